//! Errors about wrong paths on the command line, with suggestions.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::exit::Usage;

/// Least similarity of a suggested name: 1 is equal.
const SIMILAR: f64 = 0.9;

/// Checks that a path to read exists. In errors, `what` names the input and `remedy` the valid
/// ones.
///
/// # Errors
/// Of usage, with the most similar name in the same folder, if any.
pub(crate) fn check_input(path: &Path, what: &str, remedy: &str) -> Result<()> {
    match path.metadata() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let meant = similar(path)
                .map(|similar| format!("; did you mean {}?", similar.display()))
                .unwrap_or_default();
            let path = path.display();
            let missing = anyhow::anyhow!("{what} {path} does not exist; {remedy}{meant}");
            Err(missing.context(Usage))
        }
        Err(error) => Err(error)
            .with_context(|| format!("failed to read {what} {}", path.display()))
            .context(Usage),
    }
}

/// Checks that a file can be written at `path`, before any work.
///
/// # Errors
/// Of usage, if its folder does not exist, or it is a folder itself.
pub(crate) fn check_output(path: &Path) -> Result<()> {
    if path.is_dir() {
        let folder = anyhow::anyhow!("{} is a folder; name a file in it", path.display());
        return Err(folder.context(Usage));
    }
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let check = |folder: &Path| match folder.is_dir() {
        true => Ok(()),
        false => bail!(
            "failed to write {}: folder {} does not exist; create it first",
            path.display(),
            folder.display()
        ),
    };
    folder.map_or(Ok(()), check).context(Usage)
}

/// The most similar name in the folder of `path`.
fn similar(path: &Path) -> Option<PathBuf> {
    let wanted = path.file_name()?.to_str()?;
    let folder = path.parent()?;
    let listed = match folder == Path::new("") {
        true => Path::new("."),
        false => folder,
    };
    let names = listed.read_dir().ok()?.filter_map(Result::ok);
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let rated = names.map(|name| (strsim::jaro_winkler(wanted, &name), name));
    let (_, name) = rated
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        // The alphabetically first of equally similar names.
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(&a.1)))?;
    Some(folder.join(name))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_most_similar_name_is_suggested() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "results.parquet",
            "results.parquet.parts",
            "photos",
            "b.csv",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let suggested = |name: &str| {
            let similar = similar(&folder.path().join(name))?;
            Some(similar.file_name()?.to_str()?.to_owned())
        };
        assert_eq!(suggested("result.parquet").unwrap(), "results.parquet");
        assert_eq!(suggested("resluts.parquet").unwrap(), "results.parquet");
        assert_eq!(suggested("photo").unwrap(), "photos");
        assert_eq!(suggested("truth.jsonl"), None);
        assert_eq!(similar(Path::new("/no/such/folder/results.parquet")), None);
    }

    #[test]
    fn an_output_needs_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        check_output(&folder.path().join("new.html")).unwrap();
        check_output(Path::new("new.html")).unwrap();
        for (path, words) in [
            (folder.path().join("no/new.html"), "create it first"),
            (folder.path().to_owned(), "name a file in it"),
        ] {
            let error = crate::exit::words(&check_output(&path).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}

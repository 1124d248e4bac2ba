//! `trommel export`: copies or links images into one folder per label.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, stream};
use tokio::task::spawn_blocking;
use trommel_preprocess::Limits;
use trommel_sink::ResultRow;

use crate::args::ExportArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::labelling;
use crate::lines::counted;
use crate::originals::Originals;
use crate::results::Results;

/// Images read concurrently.
const SIDE_BY_SIDE: usize = 16;
/// Longest file name that every file system supports, in bytes.
const LONGEST_NAME: usize = 200;

/// Runs the command.
///
/// # Errors
/// If the folder is not new, or no row is chosen; and after exporting all others, if an image
/// cannot be exported.
pub(crate) fn run(args: &ExportArgs, config: &Config) -> Result<Exit> {
    let dir = match (&args.by_label, args.to) {
        (Some(dir), _) => dir,
        (None, Some(tool)) => return labelling::run(args, tool, config),
        (None, None) => bail!("give a folder with --by-label, or a program with --to"),
    };
    let failed = || format!("failed to create {}", dir.display());
    std::fs::create_dir_all(dir)
        .with_context(failed)
        .context(Usage)?;
    let mut entries = dir.read_dir().with_context(failed).context(Usage)?;
    if entries.next().is_some() {
        let dir = dir.display();
        return Err(anyhow::anyhow!("{dir} is not empty; give a new folder").context(Usage));
    }
    let results = Results::open(&args.results, config)?;
    let root = args.root.as_deref();
    let originals = Originals::of(&results, root, config).context(Usage)?;
    let runtime = crate::runtime::on_all_cores()?;
    let export = Export {
        originals: Arc::new(originals),
        dir: dir.clone(),
        link: args.link,
    };
    let exported = runtime.block_on(export.all(&results, args))?;
    let Exported {
        images,
        labels,
        left_out,
    } = exported;
    let message = format!(
        "trommel: {} of {}: {}\n",
        counted(images, "image"),
        counted(labels, "label"),
        dir.display()
    );
    std::io::stderr().write_all(message.as_bytes())?;
    match left_out {
        Some((count, example)) => {
            let images = counted(count, "image");
            bail!("{images} could not be exported; {example}")
        }
        None if images == 0 => bail!("no row of {results} matches"),
        None => Ok(Exit::Success),
    }
}

/// The result.
#[derive(Default)]
struct Exported {
    images: u64,
    labels: usize,
    /// Number of images that could not be exported, and the first of them with the reason.
    left_out: Option<(u64, String)>,
}

#[derive(Clone)]
struct Export {
    originals: Arc<Originals>,
    dir: PathBuf,
    link: bool,
}

impl Export {
    /// Exports the images of all chosen rows.
    async fn all(&self, results: &Results, args: &ExportArgs) -> Result<Exported> {
        let mut names = Names::default();
        let mut broken = None;
        // Rows are read from local files, a few at a time.
        let chosen = results.rows()?.filter_map(|row| match row {
            Ok(row) => is_chosen(&row, args).then_some(row),
            Err(error) => {
                broken.get_or_insert(error);
                None
            }
        });
        let mut exported = Exported::default();
        let work = chosen.map(|row| {
            let place = names.of(&row);
            let export = self.clone();
            async move {
                let done = match place {
                    Ok(place) => export.one(&row.uri, &export.dir.join(place)).await,
                    Err(error) => Err(error),
                };
                (row.uri, done)
            }
        });
        let mut done = stream::iter(work).buffer_unordered(SIDE_BY_SIDE);
        while let Some((uri, done)) = done.next().await {
            match done {
                Ok(()) => exported.images += 1,
                Err(reason) => {
                    let first = || (0, format!("{uri}: {reason}"));
                    exported.left_out.get_or_insert_with(first).0 += 1;
                }
            }
        }
        drop(done);
        exported.labels = names.folders.len();
        match broken {
            Some(error) => Err(error.into()),
            None => Ok(exported),
        }
    }

    /// Copies or links one image.
    async fn one(&self, uri: &str, target: &Path) -> Result<(), String> {
        let folder = target.parent().unwrap_or(&self.dir);
        let words = |error: std::io::Error| format!("{}: {error}", target.display());
        std::fs::create_dir_all(folder).map_err(words)?;
        let file = self.originals.file(uri);
        if self.link {
            let Some(file) = file else {
                return Err("only local files can be linked; use --copy".to_owned());
            };
            file.metadata()
                .map_err(|error| format!("{}: {error}", file.display()))?;
            return std::os::unix::fs::symlink(file, target).map_err(words);
        }
        let bytes = self
            .originals
            .read(uri, Limits::default().max_bytes)
            .await?;
        let target = target.to_owned();
        let written = spawn_blocking(move || std::fs::write(target, bytes)).await;
        written
            .map_err(|_| "the copy was interrupted".to_owned())?
            .map_err(words)
    }
}

fn is_chosen(row: &ResultRow, args: &ExportArgs) -> bool {
    let (Some(label), Some(score)) = (&row.label, row.score) else {
        return false;
    };
    (args.label.is_empty() || args.label.contains(label))
        && args.min_score.is_none_or(|least| score >= least)
        && args.max_score.is_none_or(|most| score <= most)
}

/// Assigns paths to images, without collisions.
#[derive(Default)]
struct Names {
    /// The folder of each label.
    folders: HashMap<String, String>,
    taken: HashSet<PathBuf>,
}

impl Names {
    /// The path of a row's image.
    fn of(&mut self, row: &ResultRow) -> Result<PathBuf, String> {
        let label = row.label.as_deref().unwrap_or_default();
        let folder = match self.folders.get(label) {
            Some(folder) => folder.clone(),
            None => {
                let mut folder = file_name(label);
                // Labels may differ only in characters that file names do not support.
                while self.folders.values().any(|taken| *taken == folder) {
                    folder.push('_');
                }
                self.folders.insert(label.to_owned(), folder.clone());
                folder
            }
        };
        let name = file_name(row.uri.rsplit(['/', '#']).next().unwrap_or_default());
        let mut place = Path::new(&folder).join(&name);
        if !self.taken.insert(place.clone()) {
            // The index goes first, so that the suffix stays.
            place = Path::new(&folder).join(format!("{}-{name}", row.index));
            if !self.taken.insert(place.clone()) {
                return Err(format!("{} is taken", place.display()));
            }
        }
        Ok(place)
    }
}

/// A text as a file name: no separators, not hidden, not too long.
fn file_name(text: &str) -> String {
    let is_odd = |letter: char| letter == '/' || letter == '\\' || letter.is_control();
    let mut name = text.replace(is_odd, "_");
    if name.is_empty() || name.starts_with('.') {
        name.insert(0, '_');
    }
    if name.len() > LONGEST_NAME {
        // The end, which includes the suffix, is more useful.
        let from = name.ceil_char_boundary(name.len() - LONGEST_NAME);
        name.drain(..from);
    }
    name
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn row(index: u64, uri: &str, label: &str) -> ResultRow {
        ResultRow {
            index,
            uri: uri.to_owned(),
            etag: None,
            status: "ok".to_owned(),
            error_kind: None,
            error: None,
            label: Some(label.to_owned()),
            score: Some(0.9),
            finished_at: None,
            top: Vec::new(),
            columns: BTreeMap::new(),
        }
    }

    #[test]
    fn no_image_leaves_the_folder_or_takes_anothers_place() {
        let mut names = Names::default();
        let mut of = |index, uri: &str, label: &str| {
            let place = names.of(&row(index, uri, label)).unwrap();
            place.to_str().unwrap().to_owned()
        };
        assert_eq!(of(0, "a/cat.jpg", "cat"), "cat/cat.jpg");
        assert_eq!(of(1, "b/cat.jpg", "cat"), "cat/1-cat.jpg");
        assert_eq!(of(2, "b/cat.jpg", "../../etc"), "_.._.._etc/cat.jpg");
        assert_eq!(of(3, "b/cat.jpg", "cat/dog"), "cat_dog/cat.jpg");
        assert_eq!(of(4, "b/cat.jpg", "cat\\dog"), "cat_dog_/cat.jpg");
        assert_eq!(of(5, "s3://b/..", ""), "_/_..");
        assert_eq!(of(6, "shard.tar#x/y.png", "cat"), "cat/y.png");
        assert!(of(7, &format!("{}.jpg", "é".repeat(300)), "cat").ends_with("é.jpg"));
    }
}

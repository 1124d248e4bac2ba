//! Forecasts saved until the job itself runs.

use std::io;
use std::path::{Path, PathBuf};

use trommel_types::{Forecast, JobRequest, JobSpec};

/// A hash of everything in a request that affects its rows, without id, limits and prices.
pub(crate) fn key_of_request(request: &JobRequest) -> String {
    let mut spec = JobSpec {
        source: request.sources.join("\n"),
        request: request.clone(),
        ..JobSpec::default()
    };
    spec.request.options.dry_run = false;
    spec.hash()
}

fn file(cache: &Path, key: &str) -> PathBuf {
    cache.join("forecasts").join(format!("{key}.json"))
}

/// Saves the forecast of a job. If the cache cannot be written, only the comparison is lost.
pub(crate) fn keep(cache: &Path, key: &str, forecast: &Forecast) {
    let file = file(cache, key);
    let write = || -> io::Result<()> {
        let folder = file.parent().unwrap_or(cache);
        std::fs::create_dir_all(folder)?;
        let mut new = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&mut new, forecast)?;
        new.persist(&file)?;
        Ok(())
    };
    if let Err(error) = write() {
        tracing::warn!(%error, file = %file.display(), "failed to save the forecast; the summary will not compare the job with it");
    }
}

/// The last forecast of a job, if any.
pub(crate) fn recall(cache: &Path, key: &str) -> Option<Forecast> {
    let text = std::fs::read(file(cache, key)).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use trommel_types::JobOptions;

    use super::*;

    #[test]
    fn a_forecast_is_found_again_by_the_job_itself() {
        let cache = tempfile::tempdir().unwrap();
        let dry = JobRequest {
            id: "dry".to_owned(),
            sources: vec!["photos/".to_owned()],
            options: JobOptions {
                dry_run: true,
                ..JobOptions::default()
            },
            ..JobRequest::default()
        };
        let real = JobRequest {
            id: "real".to_owned(),
            options: JobOptions {
                max_cost: Some(3.0),
                prices: vec!["infer=1/h".parse().unwrap()],
                ..JobOptions::default()
            },
            ..dry.clone()
        };
        let forecast = Forecast {
            images: 7,
            seconds: 1.5,
            low_seconds: None,
            high_seconds: None,
            cost: None,
        };
        assert_eq!(recall(cache.path(), &key_of_request(&real)), None);
        keep(cache.path(), &key_of_request(&dry), &forecast);
        assert_eq!(recall(cache.path(), &key_of_request(&real)), Some(forecast));
        let other = JobRequest {
            sources: vec!["others/".to_owned()],
            ..real
        };
        assert_eq!(recall(cache.path(), &key_of_request(&other)), None);
    }
}

//! `trommel dedup`: which images are the same but for little.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use trommel_infer::normalize;
use trommel_types::{Classification, TopLabel};

use super::derived;
use super::embedding;
use super::near::pairs;
use crate::args::DedupArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::results::Results;

/// Runs the command: rows for the images that have a duplicate, those of a group one after the other, whose
/// label is the uri of the first of them and whose score is the cosine with the most similar of them.
///
/// # Errors
/// When the results have no embeddings, or of several models.
pub(crate) fn run(args: &DedupArgs, config: &Config) -> Result<Exit> {
    let results = Results::open_embedded(&args.results, config)?;
    let (images, first) = Images::read(&results).context(Usage)?;
    let groups = images.groups(args.threshold, args.recall);
    let duplicates: usize = groups.iter().map(|group| group.len() - 1).sum();
    let stored = results.stored()?;
    let options = [
        ("threshold", args.threshold.to_string()),
        ("recall", args.recall.to_string()),
    ];
    let record = derived::record(&results, &stored, &first, options);
    drop(stored);
    let wanted: HashMap<u64, (usize, usize, f32)> = {
        let places = groups.iter().enumerate().flat_map(|(group, members)| {
            let members = members.iter().enumerate();
            members.map(move |(place, (image, cosine))| (*image, (group, place, *cosine)))
        });
        places
            .map(|(image, place)| (images.indices[image], place))
            .collect()
    };
    let mut rows: BTreeMap<(usize, usize), Classification> = BTreeMap::new();
    for row in results.stored()? {
        let row = row?;
        if let Some((group, place, _)) = wanted.get(&row.image.index) {
            rows.insert((*group, *place), row);
        }
    }
    let firsts: HashMap<usize, Arc<str>> = rows
        .iter()
        .filter(|((_, place), _)| *place == 0)
        .map(|((group, _), row)| (*group, Arc::from(row.image.uri.as_str())))
        .collect();
    let rows = rows.into_iter().map(|((group, _), row)| {
        let label = TopLabel {
            label: Arc::clone(&firsts[&group]),
            class: u32::try_from(group).unwrap_or(u32::MAX),
            score: wanted[&row.image.index].2,
        };
        (row, label)
    });
    let written = derived::write_labelled(&args.derived, record, config, rows)?;
    let told = format!(
        "trommel: {duplicates} of {} images repeat another one, in {} groups\n",
        images.indices.len(),
        groups.len()
    );
    io::stderr().write_all(told.as_bytes())?;
    written.tell("of duplicates", &args.derived)?;
    Ok(Exit::Success)
}

/// The embeddings of all images, in memory.
struct Images {
    width: usize,
    /// `f32[n, width]`, each of length 1.
    vectors: Vec<f32>,
    /// The row of each.
    indices: Vec<u64>,
}

impl Images {
    fn read(results: &Results) -> Result<(Self, Classification)> {
        let mut images = Self {
            width: 0,
            vectors: Vec::new(),
            indices: Vec::new(),
        };
        let mut first: Option<Classification> = None;
        for row in results.stored()? {
            let row = row?;
            if let Some(vector) = embedding(&row)? {
                let known = first
                    .as_ref()
                    .map_or(&row.model_version, |first| &first.model_version);
                if *known != row.model_version
                    || (images.width != 0 && images.width != vector.len())
                {
                    bail!("{results} has embeddings of several models, which cannot be compared");
                }
                images.width = vector.len();
                let start = images.vectors.len();
                images.vectors.extend_from_slice(vector);
                normalize(&mut images.vectors[start..]);
                images.indices.push(row.image.index);
            }
            first.get_or_insert(row);
        }
        let first = first.with_context(|| format!("{results} holds no rows"))?;
        match images.indices.is_empty() {
            true => bail!("no image of {results} has an embedding: all of them failed"),
            false => Ok((images, first)),
        }
    }

    /// Images that are the same, by their places, each with its cosine with the most similar one of its
    /// group. The first image of a group stands first.
    fn groups(&self, threshold: f32, recall: f32) -> Vec<Vec<(usize, f32)>> {
        let vector = |place: usize| &self.vectors[place * self.width..][..self.width];
        // Copies need not be compared, and would be with each other.
        let mut distinct: HashMap<Vec<u32>, Vec<usize>> = HashMap::new();
        for place in 0..self.indices.len() {
            let key = vector(place).iter().map(|value| value.to_bits()).collect();
            distinct.entry(key).or_default().push(place);
        }
        let mut copies: Vec<Vec<usize>> = distinct.into_values().collect();
        copies.sort_unstable();
        let firsts: Vec<f32> = copies
            .iter()
            .flat_map(|copies| vector(copies[0]).iter().copied())
            .collect();
        let mut sets = Sets((0..copies.len()).collect());
        let mut best = vec![0.0f32; copies.len()];
        for pair in pairs(&firsts, self.width, threshold, recall) {
            let (first, second) = pair.places;
            sets.join(first, second);
            for place in [first, second] {
                best[place] = best[place].max(pair.cosine.min(1.0));
            }
        }
        let mut groups: BTreeMap<usize, Vec<(usize, f32)>> = BTreeMap::new();
        for (place, copies) in copies.iter().enumerate() {
            let cosine = if copies.len() > 1 { 1.0 } else { best[place] };
            let members = copies.iter().map(|copy| (*copy, cosine));
            groups.entry(sets.of(place)).or_default().extend(members);
        }
        let mut groups: Vec<_> = groups
            .into_values()
            .filter(|group| group.len() > 1)
            .collect();
        groups
            .iter_mut()
            .for_each(|group| group.sort_unstable_by_key(|(place, _)| *place));
        groups.sort_unstable_by_key(|group| group[0].0);
        groups
    }
}

/// Sets that are joined; each has its lowest place as its name.
struct Sets(Vec<usize>);

impl Sets {
    fn of(&mut self, place: usize) -> usize {
        let mut at = place;
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.of(a), self.of(b));
        self.0[a.max(b)] = a.min(b);
    }
}

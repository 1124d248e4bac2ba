//! `trommel dedup`: finds near-duplicate images.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use trommel_infer::normalize;
use trommel_types::{Classification, Outcome, PHASH, Scalar, TopLabel};

use super::derived;
use super::embedding;
use super::{hamming, near};
use crate::args::DedupArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::lines::counted;
use crate::results::Results;

/// Runs the command. Writes rows for the images that have a duplicate, group by group: the label is
/// the uri of the group's first image, the score is the similarity with the most similar one: the
/// cosine of embeddings, or the share of equal bits of hashes.
///
/// # Errors
/// If the results have neither embeddings nor hashes, or those of several models.
pub(crate) fn run(args: &DedupArgs, config: &Config) -> Result<Exit> {
    let results = Results::open_embedded(&args.results, config)?;
    let (images, first) = Images::read(&results, args).context(Usage)?;
    let groups = images.groups(args);
    let duplicates: usize = groups.iter().map(|group| group.len() - 1).sum();
    let stored = results.stored()?;
    let record = derived::record(&results, &stored, &first, images.options(args));
    drop(stored);
    let wanted: HashMap<u64, (usize, usize, f32)> = {
        let places = groups.iter().enumerate().flat_map(|(group, members)| {
            let members = members.iter().enumerate();
            members.map(move |(place, (image, cosine))| (*image, (group, place, *cosine)))
        });
        places
            .map(|(image, place)| (images.indices()[image], place))
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
    let message = format!(
        "trommel: {duplicates} of {} {}, in {}\n",
        counted(images.indices().len(), "image"),
        if duplicates == 1 {
            "repeats another one"
        } else {
            "repeat another one"
        },
        counted(groups.len(), "group")
    );
    io::stderr().write_all(message.as_bytes())?;
    written.tell("of duplicates", &args.derived)?;
    Ok(Exit::Success)
}

/// All images, in memory.
enum Images {
    Embedded(Embedded),
    Hashed(Hashed),
}

/// Images with their embeddings.
#[derive(Default)]
struct Embedded {
    width: usize,
    /// `f32[n, width]`, each of length 1.
    vectors: Vec<f32>,
    /// The row index of each.
    indices: Vec<u64>,
}

/// Images with their perceptual hashes.
#[derive(Default)]
struct Hashed {
    hashes: Vec<u64>,
    /// The row index of each.
    indices: Vec<u64>,
}

impl Images {
    /// Reads embeddings, or hashes if requested or if the rows have no embeddings.
    fn read(results: &Results, args: &DedupArgs) -> Result<(Self, Classification)> {
        let stored = results.stored()?;
        let hash = stored
            .columns
            .iter()
            .position(|column| column.name == PHASH);
        let mut first: Option<Classification> = None;
        // The first classified row shows whether there are embeddings.
        let mut has_embeddings = None;
        for row in stored {
            let row = row?;
            if let Outcome::Ok(scores) = &row.outcome {
                has_embeddings = Some(scores.embedding.is_some());
            }
            first.get_or_insert(row);
            if has_embeddings.is_some() {
                break;
            }
        }
        let first = first.with_context(|| format!("{results} holds no rows"))?;
        let by_hash = args.distance.is_some() || has_embeddings == Some(false);
        let images = match hash.filter(|_| by_hash) {
            Some(column) => Self::Hashed(Hashed::read(results, column, &first)?),
            None if args.distance.is_some() => {
                bail!("{results} has no column {PHASH} to compare: classify with --phash")
            }
            None if has_embeddings == Some(false) => bail!(
                "{results} has neither embeddings nor perceptual hashes: classify with --embedding or --phash"
            ),
            None => Self::Embedded(Embedded::read(results, &first)?),
        };
        match images.indices().is_empty() {
            true => bail!("no image of {results} can be compared: all of them failed"),
            false => Ok((images, first)),
        }
    }

    /// The row index of each image.
    fn indices(&self) -> &[u64] {
        match self {
            Self::Embedded(images) => &images.indices,
            Self::Hashed(images) => &images.indices,
        }
    }

    /// The options recorded with the duplicates.
    fn options(&self, args: &DedupArgs) -> Vec<(&'static str, String)> {
        match self {
            Self::Embedded(_) => vec![
                ("threshold", args.threshold.to_string()),
                ("recall", args.recall.to_string()),
            ],
            Self::Hashed(_) => vec![("distance", distance(args).to_string())],
        }
    }

    fn groups(&self, args: &DedupArgs) -> Vec<Vec<(usize, f32)>> {
        match self {
            Self::Embedded(images) => images.groups(args.threshold, args.recall),
            Self::Hashed(images) => images.groups(distance(args)),
        }
    }
}

/// Bits in which the hashes of duplicates may differ.
fn distance(args: &DedupArgs) -> u32 {
    const DEFAULT: u32 = 4;
    args.distance.unwrap_or(DEFAULT)
}

/// Refuses rows of different models.
fn check_model(row: &Classification, first: &Classification, results: &Results) -> Result<()> {
    match row.model_version == first.model_version {
        true => Ok(()),
        false => bail!("{results} holds rows of several models, which cannot be compared"),
    }
}

impl Embedded {
    fn read(results: &Results, first: &Classification) -> Result<Self> {
        let mut images = Self::default();
        for row in results.stored()? {
            let row = row?;
            let Some(vector) = embedding(&row)? else {
                continue;
            };
            check_model(&row, first, results)?;
            if images.width != 0 && images.width != vector.len() {
                bail!("{results} has embeddings of several models, which cannot be compared");
            }
            images.width = vector.len();
            let start = images.vectors.len();
            images.vectors.extend_from_slice(vector);
            normalize(&mut images.vectors[start..]);
            images.indices.push(row.image.index);
        }
        Ok(images)
    }

    /// Groups of duplicates by position, each image with its highest cosine in the group. The first
    /// image of a group comes first.
    fn groups(&self, threshold: f32, recall: f32) -> Vec<Vec<(usize, f32)>> {
        let vector = |place: usize| &self.vectors[place * self.width..][..self.width];
        let mut groups = Groups::new(self.indices.len());
        // Copies need not be compared, and would be with each other.
        let mut distinct: HashMap<Vec<u32>, usize> = HashMap::new();
        let mut firsts = Vec::new();
        for place in 0..self.indices.len() {
            let key = vector(place).iter().map(|value| value.to_bits()).collect();
            match distinct.entry(key) {
                Entry::Occupied(first) => groups.join(*first.get(), place, 1.0),
                Entry::Vacant(entry) => {
                    entry.insert(place);
                    firsts.push(place);
                }
            }
        }
        let vectors: Vec<f32> = firsts
            .iter()
            .flat_map(|place| vector(*place))
            .copied()
            .collect();
        for pair in near::pairs(&vectors, self.width, threshold, recall) {
            let (first, second) = pair.places;
            groups.join(firsts[first], firsts[second], pair.cosine.min(1.0));
        }
        groups.finish()
    }
}

impl Hashed {
    fn read(results: &Results, column: usize, first: &Classification) -> Result<Self> {
        let mut images = Self::default();
        for row in results.stored()? {
            let row = row?;
            let hash = match (&row.outcome, row.image.columns.get(column)) {
                (Outcome::Failed(_), _) => continue,
                (_, Some(Scalar::String(hash))) => u64::from_str_radix(hash, 16).ok(),
                _ => None,
            };
            let uri = &row.image.uri;
            let hash = hash.with_context(|| {
                format!("{PHASH} of {uri} in {results} is not a hash of 16 hexadecimal digits")
            })?;
            check_model(&row, first, results)?;
            images.hashes.push(hash);
            images.indices.push(row.image.index);
        }
        Ok(images)
    }

    /// The same as [`Embedded::groups`], with the share of equal bits instead of the cosine.
    fn groups(&self, distance: u32) -> Vec<Vec<(usize, f32)>> {
        let mut groups = Groups::new(self.hashes.len());
        let mut sorted: Vec<(u64, usize)> = self.hashes.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        // Copies need not be compared, and would be with each other.
        let (mut hashes, mut firsts) = (Vec::new(), Vec::new());
        for copies in sorted.chunk_by(|a, b| a.0 == b.0) {
            hashes.push(copies[0].0);
            firsts.push(copies[0].1);
            for (_, copy) in &copies[1..] {
                groups.join(copies[0].1, *copy, 1.0);
            }
        }
        drop(sorted);
        hamming::pairs(&hashes, distance, |(first, second, apart)| {
            let equal = (hamming::BITS - apart) as f32 / hamming::BITS as f32;
            groups.join(firsts[first], firsts[second], equal);
        });
        groups.finish()
    }
}

/// A union of images into groups.
struct Groups {
    sets: Sets,
    /// The similarity of the most similar other image.
    best: Vec<Option<f32>>,
}

impl Groups {
    fn new(count: usize) -> Self {
        Self {
            sets: Sets((0..count).collect()),
            best: vec![None; count],
        }
    }

    fn join(&mut self, a: usize, b: usize, similarity: f32) {
        self.sets.join(a, b);
        for place in [a, b] {
            let best = &mut self.best[place];
            *best = Some(best.map_or(similarity, |best| best.max(similarity)));
        }
    }

    /// The groups by their first images, with all of their images in order.
    fn finish(mut self) -> Vec<Vec<(usize, f32)>> {
        let mut groups: BTreeMap<usize, Vec<(usize, f32)>> = BTreeMap::new();
        for (place, best) in self.best.iter().enumerate() {
            if let Some(best) = best {
                let group = groups.entry(self.sets.of(place)).or_default();
                group.push((place, *best));
            }
        }
        groups.into_values().collect()
    }
}

/// Disjoint sets, each named after its lowest position.
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

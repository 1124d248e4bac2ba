//! The objects under a prefix of an S3 bucket.

use std::collections::{HashSet, VecDeque};

use tokio::sync::mpsc;
use trommel_storage::{
    StorageError,
    background::{self, Pending},
    s3::{Entry, Location, Object, Page, S3},
};

use crate::SourceOptions;
use crate::keys::{self, Keys};
use crate::listing::{Listing, Stop, Visitor};
use crate::stores::Stores;

/// Number of folders on the first page above which they are considered small, and not listed
/// separately.
const FEW_FOLDERS: usize = 8;
/// Folders listed concurrently.
const SIDE_BY_SIDE: usize = 8;
/// Buffered pages per folder.
const PAGES: usize = 4;

/// A section of a listing.
enum Segment {
    Object(Object),
    /// The pages of a folder being listed.
    Folder(mpsc::Receiver<Result<Page, StorageError>>),
}

/// All objects whose keys have a prefix, or match a pattern, in byte order of the keys.
pub(super) struct S3Prefix {
    s3: S3,
    prefix: Location,
    keys: Keys,
}

impl S3Prefix {
    /// # Errors
    /// If the bucket does not exist or cannot be listed, or no key has the prefix or matches.
    pub(super) fn open(
        spec: &str,
        stores: &Stores,
        options: &SourceOptions,
    ) -> Result<Box<dyn Listing>, StorageError> {
        let prefix = Self::prefix(spec)?;
        let first = background::wait(stores.s3.list(&prefix, None, None))?;
        let any = !first.objects.is_empty();
        keys::open(spec, &prefix.key, any, options, |keys| {
            Self::new(stores, &prefix, keys)
        })
    }

    /// The uris of all objects that match a pattern, regardless of suffix.
    ///
    /// # Errors
    /// If nothing is found, or the listing fails.
    pub(super) fn matches(spec: &str, stores: &Stores) -> Result<Vec<String>, StorageError> {
        let prefix = Self::prefix(spec)?;
        keys::matches(spec, &prefix.key, |keys| Self::new(stores, &prefix, keys))
    }

    fn prefix(spec: &str) -> Result<Location, StorageError> {
        Location::parse(spec).ok_or_else(|| {
            StorageError::invalid_source(format!("source {spec}: expected s3://bucket/prefix"))
        })
    }

    fn new(stores: &Stores, place: &Location, keys: Keys) -> Self {
        Self {
            s3: stores.s3.clone(),
            prefix: place.with_key(keys.prefix.clone()),
            keys,
        }
    }

    async fn page(
        s3: S3,
        prefix: Location,
        after: Option<String>,
        page: Option<String>,
    ) -> Result<Page, StorageError> {
        s3.list(&prefix, after, page).await
    }

    /// Lists what follows a key, or everything. If the first page has few, and so large, folders,
    /// they are listed concurrently and passed on in order.
    fn list_behind(
        &self,
        after: Option<String>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        visitor.waiting()?;
        let (s3, prefix, from) = (self.s3.clone(), self.prefix.clone(), after.clone());
        let first = background::start(Self::page(s3, prefix, from, None)).wait()?;
        if first.next.is_some() && (2..=FEW_FOLDERS).contains(&self.folders_of(&first.objects)) {
            self.list_folders(after, options, visitor)
        } else {
            self.list_pages(first, options, visitor)
        }
    }

    /// Number of folders of the prefix that contain these objects.
    fn folders_of(&self, objects: &[Object]) -> usize {
        let folders = objects
            .iter()
            .filter_map(|object| self.folder_of(&object.key));
        folders.collect::<HashSet<_>>().len()
    }

    /// The part of a key up to the first slash after the prefix.
    fn folder_of<'a>(&self, key: &'a str) -> Option<&'a str> {
        let start = self.prefix.key.len();
        let slash = key.get(start..)?.find('/')?;
        Some(&key[..=start + slash])
    }

    fn list_folders(
        &self,
        after: Option<String>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let mut under_way = VecDeque::new();
        // Some stores omit a folder if the listing starts inside it.
        let folder = after.as_deref().and_then(|after| self.folder_of(after));
        let mut from = match folder {
            Some(folder) => {
                under_way.push_back(self.start(Entry::Folder(folder.to_owned()), after.clone()));
                Some(format!("{folder}{}", char::MAX))
            }
            None => after.clone(),
        };
        let mut token = None;
        loop {
            let (s3, prefix) = (self.s3.clone(), self.prefix.clone());
            let level = async move { s3.list_level(&prefix, from, token).await };
            let level = background::start(level).wait()?;
            for entry in level.entries {
                under_way.push_back(self.start(entry, None));
                if under_way.len() > SIDE_BY_SIDE
                    && let Some(segment) = under_way.pop_front()
                {
                    self.hand_on_segment(segment, options, visitor)?;
                }
            }
            (from, token) = (None, level.next);
            if token.is_none() {
                break;
            }
        }
        under_way
            .into_iter()
            .try_for_each(|segment| self.hand_on_segment(segment, options, visitor))
    }

    /// Starts the listing of a folder, after the key `after`.
    fn start(&self, entry: Entry, after: Option<String>) -> Segment {
        let folder = match entry {
            Entry::Object(object) => return Segment::Object(object),
            Entry::Folder(folder) => self.prefix.with_key(folder),
        };
        let (sender, pages) = mpsc::channel(PAGES);
        let s3 = self.s3.clone();
        background::spawn(async move {
            let (mut after, mut token) = (after, None);
            loop {
                let page = s3.list(&folder, after.take(), token).await;
                token = page.as_ref().ok().and_then(|page| page.next.clone());
                // The receiver is gone.
                if sender.send(page).await.is_err() || token.is_none() {
                    return;
                }
            }
        });
        Segment::Folder(pages)
    }

    fn hand_on_segment(
        &self,
        segment: Segment,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let mut pages = match segment {
            Segment::Object(object) => return self.hand_on(object, options, visitor),
            Segment::Folder(pages) => pages,
        };
        visitor.waiting()?;
        while let Some(page) = pages.blocking_recv() {
            for object in page?.objects {
                self.hand_on(object, options, visitor)?;
            }
        }
        Ok(())
    }

    fn list_pages(
        &self,
        first: Page,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let mut page = Some(first);
        while let Some(Page { objects, next }) = page.take() {
            // Requested before this page is passed on, so that it is ready afterwards.
            let pending = next.map(|token| {
                let (s3, prefix) = (self.s3.clone(), self.prefix.clone());
                background::start(Self::page(s3, prefix, None, Some(token)))
            });
            for object in objects {
                self.hand_on(object, options, visitor)?;
            }
            visitor.waiting()?;
            page = pending.map(Pending::wait).transpose()?;
        }
        Ok(())
    }

    fn hand_on(
        &self,
        object: Object,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let uri = |key| self.prefix.with_key(key).uri();
        self.keys.hand_on(object, uri, options, visitor)
    }
}

impl Listing for S3Prefix {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        self.list_behind(None, options, visitor)
    }

    fn can_go_on(&self) -> bool {
        true
    }

    fn list_from(
        &self,
        last_uri: &str,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let last = Location::parse(last_uri).filter(|last| {
            last.bucket == self.prefix.bucket && last.key.starts_with(&self.prefix.key)
        });
        match last {
            Some(last) => self.list_behind(Some(last.key), options, visitor),
            None => Err(keys::moved(last_uri, &self.prefix.uri())),
        }
    }
}

//! Checks that this binary understands every command in the documents.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;

use crate::args::Cli;

/// The `trommel` commands in the shell blocks of a page, one per line.
fn commands(page: &str) -> Vec<String> {
    let (mut found, mut is_shell) = (Vec::new(), false);
    let page = page.replace("\\\n", " ");
    for line in page.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            is_shell = !is_shell && language == "sh";
        } else if is_shell {
            let parts = line.split('|').map(str::trim);
            let own = parts.filter(|part| part.split_whitespace().any(|word| word == "trommel"));
            found.extend(own.map(str::to_owned));
        }
    }
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// README.md and all pages of `docs`.
fn pages() -> Vec<PathBuf> {
    let pages = fs::read_dir(root().join("docs")).unwrap();
    let mut pages: Vec<_> = pages.map(|page| page.unwrap().path()).collect();
    pages.retain(|page| page.extension().is_some_and(|suffix| suffix == "md"));
    pages.push(root().join("README.md"));
    pages
}

#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut followed = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1) {
            let target = link.split([')', '#']).next().unwrap();
            if !target.is_empty() && !target.contains("://") {
                let file = page.parent().unwrap().join(target);
                assert!(file.exists(), "{}: {target}", page.display());
                followed += 1;
            }
        }
    }
    assert!(followed > 20, "only {followed} links were found");
}

#[test]
fn readme_is_read_in_a_few_minutes() {
    let words = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(words.split_whitespace().count() <= 800);
}

#[test]
fn every_documented_command_is_understood() {
    let mut understood = 0;
    for page in pages() {
        for command in commands(&fs::read_to_string(&page).unwrap()) {
            let words = shlex::split(&command).unwrap_or_else(|| panic!("{command}"));
            // Without preceding variables and trailing redirections.
            let own = words.into_iter().skip_while(|word| word != "trommel");
            let own = own.take_while(|word| !matches!(word.as_str(), ">" | "<" | "&" | "&&" | ";"));
            if let Err(error) = Cli::try_parse_from(own) {
                use clap::error::ErrorKind::{DisplayHelp, DisplayVersion};
                let is_shown = matches!(error.kind(), DisplayHelp | DisplayVersion);
                assert!(is_shown, "{}: {command}\n{error}", page.display());
            }
            understood += 1;
        }
    }
    assert!(understood > 20, "only {understood} commands were found");
}

//! `trommel demo`: classifies a few digits with the included model.
//!
//! Everything is in the binary, so it runs wherever the binary does. It writes the files into a
//! folder and then runs the commands that it shows, as if the user had typed them.

mod digits;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Parser;

use self::digits::{DIGITS, MODEL};
use crate::args::{Cli, Command, DemoArgs};
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::telemetry::Telemetry;
use crate::{classify, report};

/// Runs the command.
///
/// # Errors
/// If the folder contains other files, before anything is written to it.
pub(crate) fn run(
    args: &DemoArgs,
    config: &Config,
    onnxruntime: Option<&Path>,
    telemetry: &Telemetry,
) -> Result<Exit> {
    unpack(&args.dir).context(Usage)?;
    let at = |name: &str| args.dir.join(name).into_os_string();
    let (images, model, results) = (at("images"), at("model"), at("results.parquet"));

    let mut classify = vec!["classify".into(), images, "--model".into(), model.clone()];
    classify.extend(["--output".into(), results.clone()]);
    if Path::new(&results).exists() {
        classify.push("--overwrite".into());
    }
    let Command::Classify(parsed) = announce(classify)? else {
        bail!("the demo's first command is not classify");
    };
    let exit = classify::run(*parsed, config.clone(), onnxruntime, telemetry)?;
    if exit != Exit::Success {
        return Ok(exit);
    }
    let page = vec!["--output".into(), at("report.html")];
    let report = [vec!["report".into(), results.clone()], page].concat();
    let Command::Report(parsed) = announce(report)? else {
        bail!("the demo's second command is not report");
    };
    report::run(&parsed, config)?;

    let evaluate = ["evaluate".into(), results, "--labels-from".into()];
    let evaluate = [&evaluate[..], &["folders".into()]].concat();
    let inspect = ["model".into(), "inspect".into(), model];
    let own = "trommel classify PHOTOS --model MODEL --output results.parquet";
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "\nOpen the report in a browser. Three commands to try next:"
    )?;
    writeln!(out, "  {:<64} # how many are right", shown(&evaluate))?;
    writeln!(out, "  {:<64} # what the model expects", shown(&inspect))?;
    writeln!(out, "  {own:<64} # your own images")?;
    Ok(Exit::Success)
}

/// Writes the model and the digits to the folder.
fn unpack(dir: &Path) -> Result<()> {
    let failed = || format!("failed to write the demo to {}", dir.display());
    std::fs::create_dir_all(dir).with_context(failed)?;
    let is_empty = dir.read_dir().with_context(failed)?.next().is_none();
    let has_demo = MODEL
        .iter()
        .all(|(name, content)| std::fs::read(dir.join(name)).is_ok_and(|found| found == *content));
    if !is_empty && !has_demo {
        bail!(
            "{} contains other files; give a new folder: trommel demo DIR",
            dir.display()
        );
    }
    for (name, content) in DIGITS.iter().chain(MODEL) {
        let file = dir.join(name);
        let folder = file.parent().unwrap_or(dir);
        std::fs::create_dir_all(folder).with_context(failed)?;
        std::fs::write(&file, content).with_context(failed)?;
    }
    Ok(())
}

/// Shows a command as the user would type it, and parses it likewise.
fn announce(words: Vec<OsString>) -> Result<Command> {
    writeln!(io::stdout(), "$ {}", shown(&words))?;
    let words = ["trommel".into()].into_iter().chain(words);
    Ok(Cli::try_parse_from(words)?.command)
}

/// A command line, quoted for a shell.
fn shown(words: &[OsString]) -> String {
    let mut line = "trommel".to_owned();
    for word in words {
        let word = word.to_string_lossy();
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./,=:".contains(&byte);
        match !word.is_empty() && word.bytes().all(is_plain) {
            true => line.extend([" ", &word]),
            false => line.push_str(&format!(" '{}'", word.replace('\'', "'\\''"))),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_pasted_into_a_shell() {
        let words = ["classify", "it's here/images", "--model", "a-b_c.d/e", ""];
        let line = shown(&words.map(OsString::from));
        assert_eq!(
            line,
            r"trommel classify 'it'\''s here/images' --model a-b_c.d/e ''"
        );
    }
}

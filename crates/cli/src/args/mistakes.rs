//! Errors about invalid numbers and addresses on the command line, with the remedy.

use std::error::Error as StdError;
use std::ffi::OsString;
use std::net::AddrParseError;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Error, FromArgMatches};

use super::Cli;

/// Parses the process's command line. Ends the process, with the reason, if it is invalid.
pub(crate) fn parse() -> Cli {
    parse_from(std::env::args_os()).unwrap_or_else(|error| error.exit())
}

fn parse_from(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Cli, Error> {
    let command = with_negative_numbers(Cli::command());
    let matches = command.try_get_matches_from(words).map_err(explained)?;
    Cli::from_arg_matches(&matches)
}

/// Parses `-1` as the value of an option, so that the option refuses it, instead of as a flag.
fn with_negative_numbers(command: Command) -> Command {
    command
        .allow_negative_numbers(true)
        .mut_subcommands(with_negative_numbers)
}

/// The error with the option and the remedy, in place of the standard library's message.
fn explained(error: Error) -> Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    };
    let named = (
        text(ContextKind::InvalidArg).and_then(|option| option.split_whitespace().next()),
        text(ContextKind::InvalidValue),
        error.source().and_then(remedy),
    );
    let (Some(option), Some(value), Some(remedy)) = named else {
        return error;
    };
    let message = format!(
        "{option} must be {remedy}, but is '{value}'\n\nFor more information, try '--help'.\n"
    );
    Error::raw(ErrorKind::ValueValidation, message)
}

/// The valid values, if this was the reason for the error.
fn remedy(reason: &(dyn StdError + 'static)) -> Option<&'static str> {
    if let Some(error) = reason.downcast_ref::<ParseIntError>() {
        return Some(match error.kind() {
            IntErrorKind::Zero => "at least 1",
            IntErrorKind::PosOverflow => "a smaller number",
            _ => "a whole number, without a sign or unit",
        });
    }
    if reason.is::<ParseFloatError>() {
        return Some("a number, such as 0.5");
    }
    let is_address = reason.is::<AddrParseError>();
    is_address.then_some("an IP address and a port, such as 127.0.0.1:9464")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_says(line: &str, words: &str) {
        let error = parse_from(shlex::split(line).unwrap()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(words), "{line}: {said}");
        assert_eq!(error.exit_code(), 2, "{line}");
    }

    #[test]
    fn a_number_that_cannot_be_is_answered_with_its_option_and_the_remedy() {
        for (options, words) in [
            ("--top-k 0", "--top-k must be at least 1, but is '0'"),
            ("--top-k -1", "--top-k must be a whole number"),
            ("--top-k many", "--top-k must be a whole number"),
            ("--top-k 99999999999", "--top-k must be a smaller number"),
            ("--memory-budget 2GB", "--memory-budget must be a whole"),
            ("--min-size 10KB", "--min-size must be a whole number"),
            ("--listen localhost", "--listen must be an IP address"),
            ("--threshold 1.5", "--threshold <SCORE>': give a number"),
        ] {
            assert_says(&format!("trommel classify photos {options}"), words);
        }
        assert_says("trommel profile -m m --batches 1,0", "--batches must be");
    }

    #[test]
    fn a_log_filter_that_names_no_level_is_refused() {
        for (filter, words) in [
            ("loud", "loud is not a level: expected off, error, warn"),
            ("warn,loud", "loud is not a level"),
            ("trommel_worker", "trommel_worker is not a level"),
            ("trommel_worker=loud", "expected off, error, warn"),
            ("=x=y", "expected off, error, warn"),
        ] {
            assert_says(&format!("trommel config --log {filter}"), words);
        }
        for filter in [
            "Info",
            "off",
            "3",
            "warn,ort=off",
            "[image{index=3}]=debug",
            "''",
        ] {
            let line = format!("trommel config --log {filter}");
            parse_from(shlex::split(&line).unwrap()).unwrap();
        }
    }

    /// Types that exclude 0 are covered automatically, so options added later are too.
    #[test]
    fn no_option_answers_in_the_words_of_the_standard_library() {
        let mut commands = vec![Cli::command()];
        let mut tried = 0;
        while let Some(command) = commands.pop() {
            commands.extend(command.get_subcommands().cloned());
            for option in command.get_arguments().filter_map(|arg| arg.get_long()) {
                for value in ["0", "-1", "x"] {
                    let words = ["own", &format!("--{option}"), value];
                    let Err(error) = with_negative_numbers(command.clone())
                        .try_get_matches_from(words)
                        .map_err(explained)
                    else {
                        continue;
                    };
                    let said = error.to_string();
                    for leaked in ["non-zero", "invalid digit", "invalid float", "syntax"] {
                        assert!(!said.contains(leaked), "--{option} {value}: {said}");
                    }
                    tried += 1;
                }
            }
        }
        assert!(tried > 100, "{tried}");
    }
}

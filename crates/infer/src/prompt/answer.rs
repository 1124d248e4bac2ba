//! Interprets a server's answer.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use trommel_types::{Scores, TopLabel};

use super::request::FIELD;
use super::settings::{Asked, Constrain};

/// Tokens of one request, as the server counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// Input tokens: the prompt with its image.
    pub(crate) read: u64,
    /// Of these, cached by the server.
    pub(crate) cached: u64,
    /// Output tokens.
    pub(crate) written: u64,
}

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) tokens: Option<Tokens>,
    /// The label, or the error.
    pub(crate) scores: Result<Scores, String>,
}

#[derive(Debug, Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    message: Message,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
}

#[derive(Debug, Deserialize)]
struct Message {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Logprobs {
    #[serde(default)]
    content: Option<Vec<Token>>,
}

#[derive(Debug, Deserialize)]
struct Token {
    token: String,
    logprob: f64,
}

#[derive(Debug, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

/// Most characters of a server's text in a row.
const SHOWN: usize = 300;

/// The beginning of a text, for use in a sentence.
pub(crate) fn shown(text: &str) -> String {
    let text = text.trim();
    match text.char_indices().nth(SHOWN) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}…", &text[..end]),
    }
}

/// Reads the body of an answer.
///
/// # Errors
/// The problem, if it is not an answer at all: another request may succeed.
pub(crate) fn read(body: &[u8], asked: &Asked) -> Result<Reply, String> {
    let completion: Completion = serde_json::from_slice(body).map_err(|error| {
        let text = String::from_utf8_lossy(body);
        let is_page = text.trim_start().starts_with('<');
        match is_page {
            true => format!("it answers with a page of HTML: {}", shown(&text)),
            false => format!(
                "the response is not a completion ({error}): {}",
                shown(&text)
            ),
        }
    })?;
    let Some(choice) = completion.choices.into_iter().next() else {
        return Err("its answer holds no choices".to_owned());
    };
    let tokens = completion.usage.map(|usage| Tokens {
        read: usage.prompt_tokens,
        cached: usage
            .prompt_tokens_details
            .and_then(|details| details.cached_tokens)
            .unwrap_or(0),
        written: usage.completion_tokens,
    });
    Ok(Reply {
        tokens,
        scores: choice.scores(asked),
    })
}

impl Choice {
    fn scores(self, asked: &Asked) -> Result<Scores, String> {
        if let Some(refusal) = self.message.refusal.filter(|refusal| !refusal.is_empty()) {
            return Err(format!("the model refused: {}", shown(&refusal)));
        }
        let content = self.message.content.unwrap_or_default();
        let was_cut = match self.finish_reason.as_deref() {
            Some("length") => format!(", cut at {} tokens (prompt.max-tokens)", asked.max_tokens),
            _ => String::new(),
        };
        let outside = |text: &str| {
            Err(format!(
                "the model answered {}{was_cut}, which is not one of the choices",
                shown(text)
            ))
        };
        let (label, start) = match asked.constrain {
            Constrain::JsonSchema => match field(&content) {
                Some(found) => found,
                None => return outside(&content),
            },
            _ => {
                let label = content.trim();
                (label.to_owned(), content.len() - content.trim_start().len())
            }
        };
        let known = asked.choices.iter().position(|choice| **choice == *label);
        let (class, label): (usize, Arc<str>) = match known {
            Some(class) => (class, Arc::clone(&asked.choices[class])),
            None if !asked.choices.is_empty() => return outside(&label),
            None if label.is_empty() => {
                return Err(format!("the model answered nothing{was_cut}"));
            }
            None => (0, label.as_str().into()),
        };
        let score = match (asked.logprobs, self.logprobs.and_then(|all| all.content)) {
            (false, _) => 1.0,
            (true, Some(tokens)) if !tokens.is_empty() => {
                probability(&tokens, &content, start..start + label.len())?
            }
            (true, _) => {
                return Err(format!(
                    "the model answered {}, but its server sends no logprobs; set logprobs = false in [prompt], with which every score is 1",
                    shown(&label)
                ));
            }
        };
        let top = TopLabel {
            label,
            class: u32::try_from(class).unwrap_or(u32::MAX),
            score,
        };
        Ok(Scores {
            top: vec![top],
            ..Scores::default()
        })
    }
}

/// The label in a JSON answer, and its position.
fn field(content: &str) -> Option<(String, usize)> {
    let value: Value = serde_json::from_str(content).ok()?;
    let label = value.get(FIELD)?.as_str()?.to_owned();
    let after_name = content.find(FIELD).map_or(0, |at| at + FIELD.len() + 1);
    let within = content[after_name.min(content.len())..].find(&*label);
    Some((label, within.map_or(0, |at| after_name + at)))
}

/// The probability of the tokens that cover these bytes of the answer: the product of theirs.
///
/// If the tokens do not add up to the answer's text (partial characters, end-of-turn tokens), all
/// count.
fn probability(
    tokens: &[Token],
    content: &str,
    label: std::ops::Range<usize>,
) -> Result<f32, String> {
    let text: String = tokens.iter().map(|token| &*token.token).collect();
    let mut sum = 0.0;
    let mut at = 0;
    for token in tokens {
        let end = at + token.token.len();
        let is_of_label = at < label.end && end > label.start;
        if is_of_label || !text.starts_with(content) {
            sum += token.logprob;
        }
        at = end;
    }
    let probability = sum.exp() as f32;
    match probability.is_finite() {
        true => Ok(probability.clamp(0.0, 1.0)),
        false => Err("the server's logprobs are no numbers".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::settings;
    use super::*;

    const CHOICES: &str = "choices = [\"cat\", \"dog\"]\nconstrain = \"none\"";

    fn reply(keys: &str, content: &str, tokens: &[(&str, f64)]) -> Reply {
        let tokens: Vec<_> = tokens
            .iter()
            .map(|(token, logprob)| json!({ "token": token, "logprob": logprob }))
            .collect();
        let body = json!({
            "choices": [{
                "message": { "role": "assistant", "content": content },
                "finish_reason": "stop",
                "logprobs": { "content": tokens },
            }],
            "usage": { "prompt_tokens": 90, "completion_tokens": 2,
                       "prompt_tokens_details": { "cached_tokens": 64 } },
        });
        read(body.to_string().as_bytes(), &settings(keys).asked).unwrap()
    }

    fn best(reply: Reply) -> (String, u32, f32) {
        let top = reply.scores.unwrap().top.remove(0);
        (top.label.to_string(), top.class, top.score)
    }

    #[test]
    fn the_score_is_the_probability_of_the_answers_tokens() {
        let half = 0.5_f64.ln();
        let reply = reply(
            CHOICES,
            " dog\n",
            &[(" d", half), ("og", half), ("\n", -9.0)],
        );
        assert_eq!(
            reply.tokens,
            Some(Tokens {
                read: 90,
                cached: 64,
                written: 2
            })
        );
        let (label, class, score) = best(reply);
        assert_eq!((label.as_str(), class), ("dog", 1));
        assert!((score - 0.25).abs() < 1e-6, "{score}");
    }

    #[test]
    fn of_an_answer_in_json_the_label_counts_alone() {
        let keys = "choices = [\"cat\", \"dog\"]\nconstrain = \"json_schema\"";
        let tokens = [
            ("{\"label\": \"", -5.0),
            ("cat", 0.25_f64.ln()),
            ("\"}", -5.0),
        ];
        let (label, class, score) = best(reply(keys, "{\"label\": \"cat\"}", &tokens));
        assert_eq!((label.as_str(), class), ("cat", 0));
        assert!((score - 0.25).abs() < 1e-6, "{score}");
        assert!(reply(keys, "cat", &[("cat", 0.0)]).scores.is_err());
    }

    #[test]
    fn an_answer_outside_the_choices_is_no_label_and_its_text_is_kept() {
        let why = reply(CHOICES, "A cat, I think.", &[("A", -0.1)]).scores;
        assert!(why.unwrap_err().contains("\"A cat, I think.\""));
        assert!(reply(CHOICES, "Cat", &[("Cat", 0.0)]).scores.is_err());
        let free = reply("", "a tabby", &[("a tabby", 0.0)]);
        assert_eq!(best(free).0, "a tabby");
    }

    #[test]
    fn without_logprobs_there_is_no_score_unless_none_was_asked_for() {
        let body = json!({ "choices": [{ "message": { "content": "cat" } }] }).to_string();
        let of = |keys: &str| read(body.as_bytes(), &settings(keys).asked).unwrap();
        let why = of(CHOICES).scores.unwrap_err();
        assert!(why.contains("logprobs = false"), "{why}");
        let (label, _, score) = best(of(&format!("{CHOICES}\nlogprobs = false")));
        assert_eq!((label.as_str(), score), ("cat", 1.0));
        assert_eq!(of(CHOICES).tokens, None);
    }

    #[test]
    fn what_is_no_answer_is_told_from_one() {
        let asked = settings("").asked;
        for (body, words) in [
            ("<html>busy</html>", "HTML"),
            ("{\"choices\": [{\"mess", "not a completion"),
            ("{\"choices\": []}", "no choices"),
            ("", "not a completion"),
        ] {
            let why = read(body.as_bytes(), &asked).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }
}

//! The requests to a server.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::settings::{Asked, Constrain};

/// Placeholder of the image in the body. No text of a prompt can contain it, as it is not valid
/// JSON text.
const PLACE: &str = "\u{0}image\u{0}";

/// The name of the only field of a JSON answer.
pub(crate) const FIELD: &str = "label";

/// A request template with a place for the image. Everything else is written once.
#[derive(Debug)]
pub(crate) struct Template {
    before: String,
    after: String,
}

impl Template {
    pub(crate) fn new(asked: &Asked) -> Self {
        let text = json!({ "type": "text", "text": asked.text });
        let image = json!({ "type": "image_url", "image_url": { "url": PLACE } });
        // Servers with a prefix cache compute the common beginning of all requests once.
        let content = match asked.image_first {
            false => json!([text, image]),
            true => json!([image, text]),
        };
        let mut messages = Vec::new();
        if let Some(system) = &asked.system {
            messages.push(json!({ "role": "system", "content": system }));
        }
        messages.push(json!({ "role": "user", "content": content }));
        let mut body = Map::new();
        let mut set = |name: &str, value: Value| drop(body.insert(name.to_owned(), value));
        set("model", json!(asked.model));
        set("messages", json!(messages));
        set("max_tokens", json!(asked.max_tokens));
        set("temperature", json!(asked.temperature));
        set("stream", json!(false));
        if let Some(seed) = asked.seed {
            set("seed", json!(seed));
        }
        if asked.logprobs {
            set("logprobs", json!(true));
        }
        if let Some((name, value)) = constraint(asked) {
            set(name, value);
        }
        body.extend(asked.extra.clone());
        let body = Value::Object(body).to_string();
        let place = Value::from(PLACE).to_string();
        let (before, after) = body
            .split_once(place.trim_matches('"'))
            .expect("the place was put there");
        Self {
            before: before.to_owned(),
            after: after.to_owned(),
        }
    }

    /// The body for an image, which is a PNG or a JPEG.
    pub(crate) fn body(&self, image: &[u8]) -> Bytes {
        let kind = match image.starts_with(b"\x89PNG") {
            true => "data:image/png;base64,",
            false => "data:image/jpeg;base64,",
        };
        let length = self.before.len() + kind.len() + self.after.len() + image.len() / 3 * 4 + 4;
        let mut body = String::with_capacity(length);
        body.push_str(&self.before);
        body.push_str(kind);
        BASE64_STANDARD.encode_string(image, &mut body);
        body.push_str(&self.after);
        body.into()
    }
}

/// The field that constrains answers to the choices.
fn constraint(asked: &Asked) -> Option<(&'static str, Value)> {
    let choices: Vec<&str> = asked.choices.iter().map(|choice| &**choice).collect();
    let joined = |escape: fn(&str) -> String, between: &str| {
        let each: Vec<_> = choices.iter().map(|choice| escape(choice)).collect();
        each.join(between)
    };
    match asked.constrain {
        Constrain::None => None,
        Constrain::GuidedChoice => Some(("guided_choice", json!(choices))),
        Constrain::StructuredOutputs => Some(("structured_outputs", json!({ "choice": choices }))),
        Constrain::JsonSchema => {
            let schema = json!({
                "type": "object",
                "properties": { FIELD: { "type": "string", "enum": choices } },
                "required": [FIELD],
                "additionalProperties": false,
            });
            let format = json!({
                "type": "json_schema",
                "json_schema": { "name": "answer", "strict": true, "schema": schema },
            });
            Some(("response_format", format))
        }
        Constrain::Regex => {
            let regex = format!("({})", joined(escaped_regex, "|"));
            Some(("regex", json!(regex)))
        }
        Constrain::Grammar => {
            let grammar = format!("root ::= {}", joined(quoted_grammar, " | "));
            Some(("grammar", json!(grammar)))
        }
    }
}

fn escaped_regex(choice: &str) -> String {
    let mut escaped = String::new();
    for letter in choice.chars() {
        if r"\.+*?()|[]{}^$".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// A text in GBNF.
fn quoted_grammar(choice: &str) -> String {
    format!("\"{}\"", choice.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::super::tests::settings;
    use super::*;

    fn body(keys: &str) -> Value {
        let settings = settings(keys);
        let body = Template::new(&settings.asked).body(b"\x89PNG1");
        serde_json::from_slice(&body).unwrap()
    }

    #[test]
    fn text_comes_before_the_image_unless_it_is_asked_for_otherwise() {
        let content = |keys: &str| body(keys)["messages"][0]["content"].clone();
        let (first, later) = (content(""), content("image-first = true"));
        assert_eq!(first[0]["text"], "What?");
        let image = "data:image/png;base64,iVBORzE=";
        assert_eq!(first[1]["image_url"]["url"], image);
        assert_eq!(later[0]["image_url"]["url"], image);
        assert_eq!(later[1]["text"], "What?");
    }

    #[test]
    fn everything_that_was_set_is_sent() {
        let sent = body(
            "system = \"Be \\\"brief\\\".\"\nseed = 7\nmax-tokens = 3\n[prompt.extra]\ntop_k = 4",
        );
        assert_eq!(sent["messages"][0]["content"], "Be \"brief\".");
        assert_eq!((&sent["seed"], &sent["max_tokens"]), (&json!(7), &json!(3)));
        assert_eq!(
            (&sent["top_k"], &sent["logprobs"]),
            (&json!(4), &json!(true))
        );
        assert_eq!(sent["temperature"], 0.0);
        assert!(body("logprobs = false")["logprobs"].is_null());
    }

    #[test]
    fn each_server_is_constrained_in_its_own_words() {
        let of = |constrain: &str| {
            body(&format!(
                "choices = [\"a.b\", \"say \\\"c\\\"\"]\nconstrain = \"{constrain}\""
            ))
        };
        let choices = json!(["a.b", "say \"c\""]);
        assert_eq!(of("guided_choice")["guided_choice"], choices);
        assert_eq!(
            of("structured_outputs")["structured_outputs"]["choice"],
            choices
        );
        let schema = &of("json_schema")["response_format"]["json_schema"]["schema"];
        assert_eq!(schema["properties"][FIELD]["enum"], choices);
        assert_eq!(of("regex")["regex"], "(a\\.b|say \"c\")");
        assert_eq!(
            of("grammar")["grammar"],
            "root ::= \"a.b\" | \"say \\\"c\\\"\""
        );
        assert!(of("none").get("guided_choice").is_none());
    }
}

//! Tokens that servers read and write for a job.

use std::fmt;

use indicatif::HumanCount;
use serde::Serialize;
use trommel_worker::TrialTokens;

/// The forecast of tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ExpectedTokens {
    /// Tokens of an image, by the formula of the model's family.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<f64>,
    /// Tokens of the text around it: the rest of what the server reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<f64>,
    /// Input tokens per image, as counted by the server.
    input: f64,
    /// Output tokens per image.
    output: f64,
    /// Most output tokens per image.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output: Option<u32>,
    input_total: f64,
    output_total: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output_total: Option<f64>,
}

impl ExpectedTokens {
    pub(super) fn new(tokens: TrialTokens, max_output: Option<u32>, images: f64) -> Self {
        let TrialTokens {
            read,
            written,
            image,
        } = tokens;
        Self {
            image,
            // A server that was started with other limits makes fewer tokens of an image than the formula.
            text: image.map(|image| read - image).filter(|text| *text >= 0.0),
            input: read,
            output: written,
            max_output,
            input_total: images * read,
            output_total: images * written,
            max_output_total: max_output.map(|most| images * f64::from(most)),
        }
    }
}

impl fmt::Display for ExpectedTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |tokens: f64| HumanCount(tokens.round() as u64);
        write!(f, "read {:.0} an image", self.input)?;
        match (self.image, self.text) {
            (Some(image), Some(text)) => write!(f, " (image {image:.0}, text {text:.0})")?,
            (Some(image), None) => write!(
                f,
                " (by the formula the image alone makes {image:.0}: the server has other limits)"
            )?,
            _ => {}
        }
        write!(f, ", written {:.1}", self.output)?;
        if let Some(most) = self.max_output {
            write!(f, " (at most {most})")?;
        }
        write!(
            f,
            "; in all {} read, {} written",
            count(self.input_total),
            count(self.output_total)
        )?;
        match self.max_output_total {
            Some(most) => write!(f, " (at most {})", count(most)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_said_for_an_image_and_for_all() {
        let tokens = |image| TrialTokens {
            read: 812.0,
            written: 2.5,
            image,
        };
        let said = |image, most| ExpectedTokens::new(tokens(image), most, 1e6).to_string();
        assert_eq!(
            said(Some(768.0), Some(32)),
            "read 812 an image (image 768, text 44), written 2.5 (at most 32); \
             in all 812,000,000 read, 2,500,000 written (at most 32,000,000)"
        );
        assert_eq!(
            said(None, None),
            "read 812 an image, written 2.5; in all 812,000,000 read, 2,500,000 written"
        );
        let other = said(Some(1024.0), None);
        assert!(other.contains("the server has other limits"), "{other}");
    }
}

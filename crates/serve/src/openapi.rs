use serde_json::Value;

/// The description of the HTTP interface, as OpenAPI 3.1 in JSON.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The description of a server with these models.
pub(crate) fn of_models<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut description: Value =
        serde_json::from_str(OPENAPI).expect("a test reads the description");
    let names: Vec<&str> = names.collect();
    description["components"]["parameters"]["model"]["schema"]["enum"] = names.into();
    description.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_names_the_models() {
        let description = of_models(["cats", "dogs"].into_iter());
        let description: Value = serde_json::from_str(&description).unwrap();
        let model = &description["components"]["parameters"]["model"];
        assert_eq!(model["schema"]["enum"], serde_json::json!(["cats", "dogs"]));
        assert_eq!(model["in"], "path");
    }
}

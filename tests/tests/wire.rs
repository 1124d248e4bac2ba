//! The program in `docs/wire.md` works as described.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

use serde_json::Value;
use trommel_tests::{Cluster, Folder, assert_code, assert_each_index_once, root, rows};

#[test]
fn python_submits_and_follows() {
    let page = std::fs::read_to_string(root().join("docs/wire.md")).unwrap();
    let (_, program) = page.split_once("```python\n").unwrap();
    let (program, _) = program.split_once("```").unwrap();
    let folder = Folder::with_digits(60);
    let script = folder.path("client.py");
    std::fs::write(&script, program).unwrap();
    let cluster = Cluster::with(&["ingest,preprocess,infer,sink"]);
    let output = folder.path("rows/");
    let python = root().join(".tools/wire-venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make setup`",
        python.display()
    );
    let run = Command::new(python)
        .arg(&script)
        .arg(cluster.nats.url())
        .arg(folder.images())
        .arg(&output)
        .output()
        .unwrap();
    assert_code(&run, 0);
    let said: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(
        (&said["state"], &said["total"]),
        (&"complete".into(), &60.into())
    );
    let rows = rows(&output);
    assert_each_index_once(&rows, 60);
    for row in rows {
        let label = said["labels"][row.index.to_string()].as_str();
        assert_eq!(label, row.label.as_deref(), "{}", row.uri);
    }
}

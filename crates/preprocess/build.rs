//! Checks for the tools that libjpeg-turbo's build needs, before that build fails without a clear
//! message.

use std::env;
use std::process::{Command, Stdio};

fn main() {
    // Once they exist, another PATH is no reason to rebuild everything.
    println!("cargo::rerun-if-changed=build.rs");
    let mut tools = vec!["cmake"];
    if matches!(
        env::var("CARGO_CFG_TARGET_ARCH").as_deref(),
        Ok("x86_64" | "x86")
    ) {
        // Without nasm libjpeg-turbo lacks its SIMD code and is several times slower.
        tools.push("nasm");
    }
    for tool in tools {
        let mut version = Command::new(tool);
        version
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if version.status().is_err() {
            println!("cargo::error={tool} is missing: run `make setup`, or apt-get install {tool}");
        }
    }
}

//! The arrows in ARCHITECTURE.md are those of the manifests.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

type Arrows = BTreeMap<String, BTreeSet<String>>;

#[test]
fn the_arrows_drawn_are_the_arrows_built() {
    assert_eq!(drawn(), built());
}

fn drawn() -> Arrows {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ARCHITECTURE.md");
    let text = std::fs::read_to_string(page).expect("ARCHITECTURE.md is beside this crate's folder");
    let list = text.split("```arrows\n").nth(1).and_then(|rest| rest.split("```").next());
    let lines = list.expect("a list of arrows").lines();
    let arrow = |line: &str| {
        let (from, to) = line.split_once(':').expect("a crate, a colon, and what it uses");
        (from.to_owned(), to.split_whitespace().map(str::to_owned).collect())
    };
    lines.map(arrow).collect()
}

/// From `cargo metadata`: the dependencies of our crates on each other, tests left out. A crate is called as its folder.
fn built() -> Arrows {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs, since it runs this test");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let names = packages.iter().map(|package| (text(&package["name"]), folder(package))).collect();
    packages.iter().map(|package| (folder(package), uses(package, &names))).collect()
}

fn uses(package: &Value, names: &BTreeMap<String, String>) -> BTreeSet<String> {
    let dependencies = package["dependencies"].as_array().expect("a list of dependencies");
    let built = dependencies.iter().filter(|dependency| dependency["kind"].is_null());
    built.filter_map(|dependency| names.get(&text(&dependency["name"])).cloned()).collect()
}

fn folder(package: &Value) -> String {
    let manifest = text(&package["manifest_path"]);
    let folder = Path::new(&manifest).parent().and_then(Path::file_name);
    folder.expect("a manifest lies in a folder").to_string_lossy().into_owned()
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

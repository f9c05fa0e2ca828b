//! Writes `src/v1/mod.rs` of the crate, or of the directory named, from `proto/`: `cargo run -p codegen [-- OUT]`. Needs no
//! protoc: protox compiles the protos.
//!
//! The output is committed, so that users of the crate compile no generator; this package's test fails when it is stale.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

const PACKAGE: &str = "moorage.v1";

fn crate_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The generated code, with the help of an empty directory `out`.
fn generate(out: &Path) -> Result<String, Box<dyn Error>> {
    let protos = crate_root().join("../../proto");
    let mut files: Vec<PathBuf> = fs::read_dir(protos.join("moorage/v1"))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "proto"));
    // The order of the files is the order of the code.
    files.sort();
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .out_dir(out)
        .compile_fds(protox::compile(files, [protos])?)?;
    Ok(fs::read_to_string(out.join(format!("{PACKAGE}.rs")))?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let out = crate_root().join("target/codegen");
    fs::create_dir_all(&out)?;
    let code = generate(&out)?;
    let target = env::args_os().nth(1).map_or_else(crate_root, PathBuf::from).join("src");
    fs::create_dir_all(target.join("v1"))?;
    fs::write(target.join("v1/mod.rs"), code)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_code_is_what_the_protos_generate() {
        let out = crate_root().join("target/codegen-test");
        fs::create_dir_all(&out).unwrap();
        let committed = fs::read_to_string(crate_root().join("src/v1/mod.rs")).unwrap();
        assert!(generate(&out).unwrap() == committed, "src/v1/mod.rs is stale: run `cargo run -p codegen`");
    }
}

//! Plays `examples/router` against the server that MOORAGE_SERVER names.

use std::env;
use std::process::Command;

#[test]
fn every_session_of_the_example_ends_as_it_should() {
    assert!(env::var_os("MOORAGE_SERVER").is_some(), "MOORAGE_SERVER names the server to test against");
    // `cargo test` has built it, beside the directory of this test. `cargo run` would build all that it needs anew.
    let router = env::current_exe().unwrap().parent().unwrap().with_file_name("examples").join("router");
    let output = Command::new(router).env_remove("MOORAGE_POOL").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        "good-1: answered, 3 turns, 304 tokens",
        "good-1: released as OUTCOME_COMPLETED",
        "good-2: answered, 3 turns, 304 tokens",
        "good-2: released as OUTCOME_COMPLETED",
        "broken: failed, http://127.0.0.1:8000 answered 500",
        "broken: released as OUTCOME_FAILED",
        "hung-up: released as OUTCOME_ABORTED",
        "hung-up: the caller is gone",
        "given-up: not admitted, the caller is gone",
        "given-up: withdrawn",
        "held, HOLD_REASON_",
        "nameless: InvalidArgument: ",
        "[INVALID_FIELD of moorage.v1]; session_id: ",
    ] {
        assert!(said.contains(line), "{line:?} is missing in:\n{said}");
    }
}

//! What comes out of the command line's own tree: help, completions and man pages.

use harness::{DEADLINE, Whimbrel};

#[test]
fn every_command_is_in_the_help_with_its_purpose() {
    let help = Whimbrel::run(&["--help"], DEADLINE);
    help.expect_code(0);
    for command in ["check", "receive", "migrate", "status", "cancel", "resolve", "demo", "completion"] {
        let line = help.stdout.lines().find(|line| line.trim_start().starts_with(command));
        assert!(
            line.is_some_and(|line| line.trim().len() > command.len() + 10),
            "{command}: {}",
            help.stdout
        );
    }
}

#[test]
fn completions_come_for_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let script = Whimbrel::run(&["completion", shell], DEADLINE);
        script.expect_code(0);
        assert!(script.stdout.contains("max-downtime"), "{shell}");
    }
}

#[test]
fn every_command_has_a_man_page() {
    let directory = tempfile::tempdir().unwrap();
    Whimbrel::run(&["man", &directory.path().display().to_string()], DEADLINE).expect_code(0);
    for page in ["whimbrel.1", "whimbrel-migrate.1", "whimbrel-receive.1", "whimbrel-check.1"] {
        let text = std::fs::read_to_string(directory.path().join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
}

//! The machine that measures: its name, and what a reader of a record must know of it.

use std::fs;
use std::process::Command;

/// A name for a directory, made of the CPU's: `amd-epyc-9554`.
pub fn slug() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    plain(model.map_or("unknown", |(_, name)| name))
}

/// What belongs beside every record.
pub fn description() -> String {
    // Not all of `uname -a`: the host's name says nothing about its speed.
    let commands: [&[&str]; 3] = [&["lscpu"], &["uname", "-srvmo"], &["rustc", "-vV"]];
    commands.map(|command| format!("$ {}\n{}", command.join(" "), printed(command))).join("\n")
}

fn printed(command: &[&str]) -> String {
    match Command::new(command[0]).args(&command[1..]).output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) => format!("{error}\n"),
    }
}

fn plain(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let words = words.filter(|word| !["R", "TM", "CPU", "Processor", "Core"].contains(word));
    words.collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_letters_and_digits_and_loses_trademarks() {
        assert_eq!(plain(" Intel(R) Xeon(R) Platinum 8488C"), "intel-xeon-platinum-8488c");
    }
}

//! Rules that a test may switch off, to see that the test which guards them fails without them. A release build
//! has all rules, always.

/// Whether `WHIMBREL_FAULT` names this rule, in a build with debug assertions.
pub fn is_off(rule: Rule) -> bool {
    let name = match rule {
        Rule::DirectIo => "no-direct-io-rule",
        Rule::Discards => "no-discard-rule",
    };
    cfg!(debug_assertions) && std::env::var("WHIMBREL_FAULT").is_ok_and(|wanted| wanted == name)
}

/// A rule that a migration is wrong without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Pages that direct I/O may have changed unseen are sent again behind a scan that no I/O crosses.
    DirectIo,
    /// Pages that were discarded and touched again are sent again.
    Discards,
}

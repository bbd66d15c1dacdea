//! What an operator may set about the decisions: limits, and who looks for zero pages. QEMU's names where it has them.

use serde::{Deserialize, Serialize};
use std::str::FromStr;
use std::time::Duration;

/// Limits that the source's decisions keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `downtime-limit`: the guest is stopped when the rest is expected to take no longer than this.
    pub downtime_max: Duration,
    /// How long precopy may take; none: as long as it needs.
    pub timeout: Option<Duration>,
    /// What happens when `timeout` has passed.
    pub timeout_action: TimeoutAction,
    /// Whether direct I/O can write guest RAM behind the page tables, so that some clears must be quiesced.
    pub direct_io: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            downtime_max: Duration::from_millis(300),
            timeout: None,
            timeout_action: TimeoutAction::Fail,
            direct_io: false,
        }
    }
}

/// What to do with a precopy that lasts longer than its timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeoutAction {
    /// Give up; the source runs on.
    #[default]
    Fail,
    /// Stop the guest and send the rest, however long its downtime gets.
    Switchover,
}

impl FromStr for TimeoutAction {
    type Err = ParameterError;

    fn from_str(text: &str) -> Result<Self, ParameterError> {
        match text {
            "fail" => Ok(Self::Fail),
            "switchover" => Ok(Self::Switchover),
            _ => Err(ParameterError {
                name: "timeout-action",
                value: text.into(),
                allowed: "fail, switchover",
            }),
        }
    }
}

/// `zero-page-detection`: who looks for zero pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroPageDetection {
    /// Nobody: every page that exists is sent in full.
    None,
    /// The `live_migration` thread, one page after the other, as QEMU did before 9.0. The baseline.
    Legacy,
    /// Every channel thread looks at the pages it sends.
    #[default]
    Multifd,
}

impl FromStr for ZeroPageDetection {
    type Err = ParameterError;

    fn from_str(text: &str) -> Result<Self, ParameterError> {
        match text {
            "none" => Ok(Self::None),
            "legacy" => Ok(Self::Legacy),
            "multifd" => Ok(Self::Multifd),
            _ => Err(ParameterError {
                name: "zero-page-detection",
                value: text.into(),
                allowed: "none, legacy, multifd",
            }),
        }
    }
}

/// A parameter with a value that it can't have.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{name} is {value:?}; it can be {allowed}")]
pub struct ParameterError {
    name: &'static str,
    value: String,
    allowed: &'static str,
}

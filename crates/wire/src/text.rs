//! Text of a peer that a person will read. An escape sequence in it could rewrite the operator's terminal, so
//! none gets past here.

use serde::{Deserialize, Deserializer, Serializer};

/// `text` as it may be printed: line ends and tabs become spaces, other control characters and the invisible
/// ones that reorder text are left out, and what is above 1024 characters is cut off.
pub fn shown(text: &str) -> String {
    let spaced = text.chars().map(|character| match character {
        '\n' | '\r' | '\t' => ' ',
        other => other,
    });
    spaced.filter(|&character| is_shown(character)).take(CHARACTERS_MAX).collect()
}

/// Whether [`shown`] would leave `text` as it is.
pub(crate) fn is_plain(text: &str) -> bool {
    text.chars().all(is_shown) && text.chars().count() <= CHARACTERS_MAX
}

/// For serde: a string that is made fit to be shown as it comes in.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    Ok(shown(&String::deserialize(from)?))
}

/// For serde: the twin of [`deserialize`], so that no text of ours outgrows a message either.
pub(crate) fn serialize<S: Serializer>(text: &str, into: S) -> Result<S::Ok, S::Error> {
    into.serialize_str(&shown(text))
}

/// Unicode's control characters, and its format characters that hide or reorder what stands around them.
fn is_shown(character: char) -> bool {
    let hides = matches!(character,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    !character.is_control() && !hides
}

/// Room for an error with a path and its causes, and no more than a screen.
const CHARACTERS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_escape_sequence_loses_its_escape() {
        assert_eq!(shown("\x1b]0;owned\x07\u{9b}2J disk\tfull\r\n\u{202e}"), "]0;owned2J disk full  ");
        assert_eq!(shown("Größe 2 MiB, 日本"), "Größe 2 MiB, 日本");
    }

    proptest! {
        #[test]
        fn shown_text_is_bounded_and_stays_as_it_is(text in any::<String>(), times in 1usize..40) {
            let once = shown(&text.repeat(times));
            prop_assert!(is_plain(&once));
            prop_assert_eq!(shown(&once), once);
        }
    }
}

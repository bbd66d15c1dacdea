//! Any bytes are an opening of one of the channels, or an error. The last byte says how many channels there are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::Opening;

fuzz_target!(|bytes: &[u8]| {
    let Some((&channels, bytes)) = bytes.split_last() else { return };
    if let Ok(opening) = Opening::decode(bytes, channels) {
        assert!(opening.channel < channels);
        assert_eq!(Opening::decode(&opening.encode(), channels), Ok(opening));
    }
});

//! Any text is an address that reads back from what it prints, or an error without control characters.

#![no_main]

use channel::Address;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match text.parse::<Address>() {
        Ok(address) => assert_eq!(address.to_string().parse(), Ok(address)),
        Err(error) => assert!(!error.to_string().contains(char::is_control)),
    }
});

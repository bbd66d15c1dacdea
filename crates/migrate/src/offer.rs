//! What both ends must agree on before a page moves: the source offers, the target accepts or says why not.

use ram::Layout;
use wire::{Accept, Format, Hello, Method, Session};

/// The only protocol so far.
pub const PROTOCOL: u32 = 1;

/// What an end knows of its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Version of QEMU, or the name of another VMM.
    pub qemu: String,
    /// Machine type with its version, for example `pc-q35-10.0`.
    pub machine: String,
    /// CPU model.
    pub cpu: String,
    /// CPUs of the VM.
    pub vcpus: u32,
    /// Bits of a target page, where the machine says so in its stream.
    pub page_bits: Option<u32>,
    /// RAM blocks.
    pub layout: Layout,
    /// UUID of the VM, or zeros.
    pub uuid: [u8; 16],
}

impl Offer {
    /// The source's proposal.
    pub fn hello(
        &self,
        session: Session,
        channels: u8,
        packet_bytes: u32,
        verify: bool,
        running: bool,
    ) -> Hello {
        Hello {
            protocol_min: PROTOCOL,
            protocol_max: PROTOCOL,
            session,
            version: env!("CARGO_PKG_VERSION").into(),
            qemu: self.qemu.clone(),
            machine: self.machine.clone(),
            cpu: self.cpu.clone(),
            vcpus: self.vcpus,
            page_bits: self.page_bits,
            layout: self.layout.clone(),
            uuid: self.uuid,
            channels,
            packet_bytes,
            method: Method::None.name().into(),
            verify,
            running,
        }
    }

    /// The target's answer, and its blocks under the source's names, if the VM of `hello` can become this one. `Err`
    /// says why not and what to do.
    pub fn answer(&self, hello: &Hello) -> Result<(Accept, Layout), String> {
        if !(hello.protocol_min..=hello.protocol_max).contains(&PROTOCOL) {
            return Err(format!(
                "the source (whimbrel {}) speaks protocols {} to {}, the target (whimbrel {}) only {PROTOCOL}: \
                 use the same whimbrel at both ends",
                hello.version,
                hello.protocol_min,
                hello.protocol_max,
                env!("CARGO_PKG_VERSION"),
            ));
        }
        self.same("machine type", &hello.machine, &self.machine)?;
        self.same("CPU model", &hello.cpu, &self.cpu)?;
        self.same("number of vCPUs", &hello.vcpus.to_string(), &self.vcpus.to_string())?;
        if hello.method != Method::None.name() {
            return Err(format!("this target knows no multifd-compression {}", hello.method));
        }
        Format::new(hello.packet_bytes).map_err(|error| error.to_string())?;
        let layout = self.layout.in_words_of(&hello.layout).map_err(|error| error.to_string())?;
        let accept = Accept {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            qemu: self.qemu.clone(),
            session: hello.session,
        };
        Ok((accept, layout))
    }

    fn same(&self, what: &str, source: &str, target: &str) -> Result<(), String> {
        match source == target {
            true => Ok(()),
            false => Err(format!(
                "the {what} is {source} at the source and {target} at the target: start the target's QEMU with \
                 the same machine and devices"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ram::Block;

    fn offer() -> Offer {
        let block = Block { name: "pc.ram".into(), used_bytes: 1 << 20, page_bytes: 4096 };
        Offer {
            qemu: "10.0.2".into(),
            machine: "pc-q35-10.0".into(),
            cpu: "qemu64-x86_64-cpu".into(),
            vcpus: 2,
            page_bits: None,
            layout: Layout::new(vec![block]).unwrap(),
            uuid: [0; 16],
        }
    }

    fn hello() -> Hello {
        offer().hello(Session([1; 16]), 4, 512 << 10, false, true)
    }

    #[test]
    fn a_twin_is_accepted_for_the_session_that_was_offered() {
        let (accept, _) = offer().answer(&hello()).unwrap();
        assert_eq!((accept.protocol, accept.session), (PROTOCOL, Session([1; 16])));
    }

    #[test]
    fn whatever_differs_is_refused_by_its_name_with_both_values() {
        let refused = |change: fn(&mut Hello)| {
            let mut hello = hello();
            change(&mut hello);
            offer().answer(&hello).unwrap_err()
        };
        let machine = refused(|hello| hello.machine = "pc-i440fx-10.0".into());
        assert!(
            machine.contains("machine type is pc-i440fx-10.0 at the source and pc-q35-10.0"),
            "{machine}"
        );
        assert!(refused(|hello| hello.vcpus = 3).contains("number of vCPUs is 3"));
        assert!(refused(|hello| hello.cpu = "max".into()).contains("CPU model is max"));
        assert!(refused(|hello| hello.method = "rot13".into()).contains("rot13"));
        assert!(refused(|hello| hello.packet_bytes = 5).contains('5'));
        let newer = refused(|hello| (hello.protocol_min, hello.protocol_max) = (7, 9));
        assert!(newer.contains("7 to 9"), "{newer}");
    }
}

//! What a target says to those who call: a source that proposes, a channel that opens, somebody who asks what
//! became of a migration. Knows neither sockets nor threads.

use crate::vm::TargetRam;
use crate::{Counters, Gate, Inbox, Landing, Note, Offer, Trouble, told};
use ram::{Layout, PageSets};
use scan::Kernel;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard};
use wire::{Accept, Format, Hello, Message, Opening, Session, TargetState};

/// Remembers what became of a migration.
pub type Recall = Box<dyn Fn(Session) -> TargetState + Send + Sync>;

/// Where the callers of a target are answered. It agrees to one migration and to no other after it.
pub struct Desk {
    offer: Offer,
    layout: Arc<Layout>,
    inbox: Arc<Inbox<Note>>,
    recall: Recall,
    /// What the target's RAM holds, if somebody looked before a source came.
    landing: Mutex<Option<Arc<Landing>>>,
    agreed: Mutex<Option<Arc<Agreement>>>,
}

/// The migration that was agreed on.
pub struct Agreement {
    /// Its name.
    pub session: Session,
    /// Its packets.
    pub format: Format,
    /// The answer to the source.
    pub accept: Accept,
    /// The target's blocks under the names that the source has for them.
    pub layout: Arc<Layout>,
    /// Where its channels wait for each other.
    pub gate: Arc<Gate>,
    /// Which pages hold data.
    pub landing: Arc<Landing>,
    /// What its landers have done.
    pub counters: Arc<Counters>,
    taken: Mutex<Vec<bool>>,
    settled: Mutex<Option<TargetState>>,
}

impl Desk {
    /// A desk that has agreed to nothing yet. Questions about the migration at hand go to `inbox`, those about
    /// earlier ones to `recall`.
    pub fn new(offer: Offer, inbox: Arc<Inbox<Note>>, recall: Recall) -> Self {
        Self {
            layout: Arc::new(offer.layout.clone()),
            offer,
            inbox,
            recall,
            landing: Mutex::new(None),
            agreed: Mutex::new(None),
        }
    }

    /// The blocks of the target's VM.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The migration that was agreed on.
    pub fn agreement(&self) -> Option<Arc<Agreement>> {
        self.agreed().clone()
    }

    /// Finds out what the RAM holds, so that this is known when a source comes. To be done anew when the VM has
    /// written to its RAM.
    pub fn prepare(&self, ram: &dyn TargetRam, kernel: Kernel) -> Result<Arc<Landing>, Trouble> {
        let landing = Arc::new(Landing::new(ram, PageSets::new(&self.layout), kernel)?);
        *self.landing.lock().expect("no holder panics") = Some(landing.clone());
        Ok(landing)
    }

    /// Whether this is what was last found out.
    pub fn counts_on(&self, landing: &Arc<Landing>) -> bool {
        self.prepared().is_some_and(|prepared| Arc::ptr_eq(&prepared, landing))
    }

    /// Agrees to a proposal, if this target can become that VM and has not agreed to another. `Err` says why not.
    pub fn agree(&self, hello: &Hello, ram: &dyn TargetRam) -> Result<Arc<Agreement>, String> {
        let mut agreed = self.agreed();
        if agreed.is_some() {
            return Err("this target has a migration going already".into());
        }
        let (accept, layout) = self.offer.answer(hello)?;
        let prepared = self.prepared().map_or_else(|| self.prepare(ram, Kernel::best()), Ok);
        let landing = prepared.map_err(|error| told(&*error))?;
        let agreement = Agreement::new(hello, accept, layout, landing).map_err(|error| told(&*error))?;
        Ok(agreed.insert(Arc::new(agreement)).clone())
    }

    /// Takes the place of a channel. None if it is no channel of the migration agreed on, or came already.
    pub fn take(&self, opening: &[u8]) -> Option<(Arc<Agreement>, u8)> {
        let agreement = self.agreement()?;
        let channel = agreement.take(opening)?;
        Some((agreement, channel))
    }

    /// What became of a migration; the answer may take a while. Asking about the one at hand ends it, unless its
    /// commit has come.
    pub fn ask(&self, session: Session) -> Receiver<TargetState> {
        let (reply, answer) = mpsc::channel();
        let agreement = self.agreement().filter(|agreement| agreement.session == session);
        let known = match &agreement {
            Some(agreement) => *agreement.settled.lock().expect("no holder panics"),
            None => Some((self.recall)(session)),
        };
        match known {
            // The other end of the answer is in this function's hands.
            Some(state) => drop(reply.send(state)),
            None => self.inbox.put(Note::Asked(reply)),
        }
        answer
    }

    /// Whoever asked about `session` has heard this answer. If it is the last word on the migration at hand, nobody
    /// needs to be waited for any more.
    pub fn confirm(&self, session: Session, state: TargetState) {
        let at_hand = self.agreement().is_some_and(|agreement| agreement.session == session);
        if at_hand && matches!(state, TargetState::Running | TargetState::NeverCommitted) {
            self.inbox.put(Note::Message(Message::Confirmed));
        }
    }

    fn prepared(&self) -> Option<Arc<Landing>> {
        self.landing.lock().expect("no holder panics").clone()
    }

    fn agreed(&self) -> MutexGuard<'_, Option<Arc<Agreement>>> {
        self.agreed.lock().expect("no holder panics")
    }
}

impl Agreement {
    fn new(hello: &Hello, accept: Accept, layout: Layout, landing: Arc<Landing>) -> Result<Self, Trouble> {
        Ok(Self {
            session: hello.session,
            format: Format::new(hello.packet_bytes)?,
            accept,
            gate: Arc::new(Gate::new(hello.channels)),
            landing,
            layout: Arc::new(layout),
            counters: Arc::new(Counters::default()),
            taken: Mutex::new(vec![false; hello.channels.into()]),
            settled: Mutex::new(None),
        })
    }

    fn take(&self, opening: &[u8]) -> Option<u8> {
        let mut taken = self.taken.lock().expect("no holder panics");
        let opening = Opening::decode(opening, taken.len() as u8).ok()?;
        let place = &mut taken[usize::from(opening.channel)];
        let fits = opening.session == self.session && !*place;
        *place |= fits;
        fits.then_some(opening.channel)
    }

    /// It is over: from now on this is the answer to everybody who asks.
    pub fn settle(&self, state: TargetState) {
        *self.settled.lock().expect("no holder panics") = Some(state);
    }
}

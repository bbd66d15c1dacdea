//! Somebody who asks the target what became of a migration, over connections of his own: whimbrel at the source
//! after a commit, or a person with `whimbrel resolve`. Steps through what `migrate::source::ask` does.

use crate::frames::is_ready;
use crate::net::{Life, Link, Net, Port, WireId};
use crate::{End, Shared};
use channel::{Control, ControlError};
use std::time::Duration;
use wire::{Message, Session, TargetState};

/// A question on its way.
pub(crate) struct Question {
    net: Shared<Net>,
    life: Life,
    session: Session,
    /// Until then a failed attempt is followed by another.
    end: Duration,
    retry_at: Duration,
    line: Option<Line>,
    answer: Option<Result<TargetState, String>>,
}

/// An attempt.
struct Line {
    wire: WireId,
    control: Control<Port>,
    give_up_at: Duration,
}

impl Question {
    /// A question asked at `now`, again and again until `end`.
    pub(crate) fn new(net: Shared<Net>, life: Life, session: Session, now: Duration, end: Duration) -> Self {
        Self { net, life, session, end, retry_at: now, line: None, answer: None }
    }

    /// The answer, or why there is none.
    pub(crate) fn answer(&self) -> Option<&Result<TargetState, String>> {
        self.answer.as_ref()
    }

    /// When there is something to do although nothing came.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        match (&self.answer, &self.line) {
            (Some(_), _) => None,
            (None, Some(line)) => Some(line.give_up_at),
            (None, None) => Some(self.retry_at),
        }
    }

    /// Does the next thing, if there is one.
    pub(crate) fn step(&mut self, now: Duration) -> bool {
        if self.answer.is_some() || self.life.is_over() {
            return false;
        }
        let Some(line) = &mut self.line else { return now >= self.retry_at && self.dial(now) };
        let answer = if is_ready(&self.net, line.wire, End::Source) {
            match receive(&mut line.control, self.session) {
                Ok(None) => return true,
                Ok(Some(state)) => Ok(state),
                Err(error) => Err(error),
            }
        } else if now >= line.give_up_at {
            Err("no answer in time".into())
        } else {
            return false;
        };
        self.hang_up();
        self.close(answer, now);
        true
    }

    fn dial(&mut self, now: Duration) -> bool {
        match self.try_dial(now) {
            Ok(line) => self.line = Some(line),
            Err(error) => self.close(Err(error), now),
        }
        true
    }

    fn try_dial(&self, now: Duration) -> Result<Line, String> {
        let wire = self.net.lock().expect("no holder panics").connect(Link::Question);
        let wire = wire.map_err(|error| error.to_string())?;
        let port =
            Port { net: self.net.clone(), wire, end: End::Source, life: self.life.clone(), live: None };
        let told = |error: ControlError| error.to_string();
        let mut control = Control::dial(port).map_err(told)?;
        control.send(&Message::Ask { session: self.session }).map_err(told)?;
        Ok(Line { wire, control, give_up_at: now + ANSWER_MAX })
    }

    fn hang_up(&mut self) {
        if let Some(line) = self.line.take() {
            self.net.lock().expect("no holder panics").hang_up(line.wire, End::Source);
        }
    }

    fn close(&mut self, answer: Result<TargetState, String>, now: Duration) {
        let again = matches!(answer, Ok(TargetState::Committed) | Err(_)) && now < self.end;
        match again {
            true => self.retry_at = now + PAUSE,
            false => self.answer = Some(answer),
        }
    }
}

fn receive(control: &mut Control<Port>, session: Session) -> Result<Option<TargetState>, String> {
    match control.receive().map_err(|error| error.to_string())? {
        Message::Alive => Ok(None),
        Message::Answer { session: answered, state } if answered == session => {
            // As in the real one: an answer that came is an answer.
            let _ = control.send(&Message::Confirmed);
            Ok(Some(state))
        }
        other => Err(format!("an answer of kind {} to a question", other.kind())),
    }
}

/// As `migrate::source` has them.
pub(crate) const ASK_MAX: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(200);
const ANSWER_MAX: Duration = Duration::from_secs(10);

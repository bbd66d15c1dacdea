//! What is promised at each moment of a migration. One scenario for each row of the ownership table, at every
//! point where it can break, and one for each thing that was once wrong.

use engine::{Owner, TargetOutcome};
use std::time::Duration;
use whimbrel_sim::{End, Fault, How, Link, Moment, Pair, Seed, SourceOp, TargetOp};
use wire::{Message, TargetState};

/// Everything before *commit*, in its order.
const BEFORE_COMMIT: [Moment; 9] = [
    Moment::Agreed,
    Moment::Armed,
    Moment::Round(1),
    Moment::Round(2),
    Moment::Stopped,
    Moment::Saved,
    Moment::Finished,
    Moment::Loaded,
    Moment::Ready,
];

/// A pair that has come this far.
fn pair_at(moment: Moment) -> Pair {
    let mut pair = Pair::new(Seed(7));
    pair.run_until(moment);
    pair
}

#[track_caller]
fn assert_source_runs_on(pair: &mut Pair) {
    pair.run();
    assert_eq!(pair.guest_runs_at(), Some(End::Source), "{}", pair.log());
    assert!(!pair.has(Moment::Started));
}

#[test]
fn a_guest_moves_and_the_vm_it_left_ends() {
    let mut pair = Pair::new(Seed(1));
    pair.run();
    assert_eq!(pair.guest_runs_at(), Some(End::Target));
    assert_eq!(pair.outcome().owner, Owner::Target);
    assert_eq!(pair.target_outcome(), Some(TargetOutcome::Running));
    assert!(pair.source_vm_ended());
}

#[test]
fn a_paused_guest_moves_and_stays_paused() {
    let mut pair = Pair::new(Seed(1)).with_paused_guest();
    pair.run();
    assert_eq!(pair.guest_runs_at(), None);
    assert_eq!(pair.outcome().owner, Owner::Target);
    assert!(pair.has(Moment::Started));
}

#[test]
fn a_guest_whose_disks_write_past_the_page_tables_moves_whole() {
    for seed in 0..20 {
        let mut pair = Pair::new(Seed(seed)).with_direct_io();
        pair.run();
        assert_eq!(pair.guest_runs_at(), Some(End::Target));
    }
}

// Row: attach and precopy. Row: stopped. Row: ready. Whatever dies, the source runs on and the target drops.

#[test]
fn a_target_lost_in_round_two_leaves_the_guest_running_at_the_source() {
    let mut pair = Pair::new(Seed(7)).with_endless_precopy();
    pair.run_until(Moment::Round(2));
    pair.inflict(Fault::Cut(Link::Channel(0)));
    pair.run();
    assert_eq!(pair.guest_runs_at(), Some(End::Source));
    assert_eq!(pair.outcome().owner, Owner::Source);
}

#[test]
fn a_link_that_breaks_before_commit_leaves_the_guest_running_at_the_source() {
    for moment in BEFORE_COMMIT {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::Cut(Link::Control));
        assert_source_runs_on(&mut pair);
        assert_eq!(pair.outcome().owner, Owner::Source);
        assert!(matches!(pair.target_outcome(), None | Some(TargetOutcome::Dropped(_))), "{moment:?}");
    }
}

#[test]
fn a_link_that_goes_silent_before_commit_leaves_the_guest_running_at_the_source() {
    for moment in BEFORE_COMMIT {
        for end in [End::Source, End::Target] {
            let mut pair = pair_at(moment);
            pair.inflict(Fault::HalfOpen(Link::Control, end));
            assert_source_runs_on(&mut pair);
        }
    }
}

#[test]
fn a_channel_that_goes_silent_behind_its_last_byte_leaves_the_guest_running_at_the_source() {
    let mut pair = pair_at(Moment::Saved);
    pair.inflict(Fault::HalfOpen(Link::Channel(0), End::Target));
    pair.inflict(Fault::HalfOpen(Link::Channel(1), End::Target));
    assert_source_runs_on(&mut pair);
}

#[test]
fn a_target_that_is_killed_before_commit_leaves_the_guest_running_at_the_source() {
    for moment in BEFORE_COMMIT {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::Kill(End::Target));
        assert_source_runs_on(&mut pair);
        assert_eq!(pair.outcome().owner, Owner::Source);
    }
}

#[test]
fn a_source_that_is_killed_before_commit_leaves_its_guest_running_within_a_second() {
    for moment in BEFORE_COMMIT {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::Kill(End::Source));
        let killed_at = pair.now();
        while pair.guest_runs_at().is_none() {
            pair.step(1);
        }
        assert!(pair.now() <= killed_at + Duration::from_secs(1), "{moment:?}");
        assert_source_runs_on(&mut pair);
    }
}

#[test]
fn a_cancel_before_commit_leaves_the_guest_running_at_the_source() {
    for end in [End::Source, End::Target] {
        for moment in BEFORE_COMMIT {
            let mut pair = pair_at(moment);
            pair.inflict(Fault::Cancel(end));
            assert_source_runs_on(&mut pair);
            assert_eq!(pair.outcome().cancelled, end == End::Source);
        }
    }
}

#[test]
fn whatever_the_source_vm_refuses_before_commit_leaves_its_guest_running() {
    use SourceOp::{Attach, Save, Stop};
    for (op, how) in [(Attach, How::Undone), (Stop, How::Undone), (Stop, How::Done), (Save, How::Undone)] {
        for direct_io in [false, true] {
            let mut pair = Pair::new(Seed(7));
            if direct_io {
                pair = pair.with_direct_io();
            }
            pair.inflict(Fault::SourceFails(op, how));
            assert_source_runs_on(&mut pair);
            assert_eq!(pair.outcome().owner, Owner::Source, "{op:?} {how:?}");
        }
    }
}

#[test]
fn a_guest_that_cannot_be_resumed_is_told_of_as_stopped() {
    let mut pair = pair_at(Moment::Stopped);
    pair.inflict(Fault::SourceFails(SourceOp::Resume, How::Undone));
    pair.inflict(Fault::Cut(Link::Control));
    pair.run();
    assert_eq!(pair.outcome().owner, Owner::SourceStopped);
}

#[test]
fn a_guest_that_cannot_be_resumed_after_a_quiesced_scan_is_told_of_as_stopped() {
    let mut pair = Pair::new(Seed(7)).with_direct_io();
    pair.inflict(Fault::SourceFails(SourceOp::Resume, How::Undone));
    pair.inflict(Fault::SourceFails(SourceOp::Resume, How::Undone));
    pair.run();
    assert_eq!(pair.outcome().owner, Owner::SourceStopped);
}

#[test]
fn a_target_that_cannot_load_the_state_ends_and_leaves_the_guest_running_at_the_source() {
    let mut pair = pair_at(Moment::Finished);
    pair.inflict(Fault::TargetFails(TargetOp::Load, How::Undone));
    assert_source_runs_on(&mut pair);
    assert!(pair.target_vm_ended());
}

#[test]
fn a_target_that_is_ready_and_loses_its_source_ends_its_vm() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::Kill(End::Source));
    assert_source_runs_on(&mut pair);
    assert!(pair.target_vm_ended(), "it holds a copy of a guest that runs elsewhere");
}

// Row: commit is written. Exactly one side runs the guest, or it stands still until somebody has asked.

#[test]
fn a_source_that_is_killed_once_commit_is_written_leaves_the_guest_to_the_target() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::SourceFails(SourceOp::Commit, How::KilledAfter));
    pair.run();
    assert_eq!(pair.guest_runs_at(), Some(End::Target));
}

#[test]
fn a_source_that_is_killed_just_before_it_writes_commit_keeps_the_guest() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::SourceFails(SourceOp::Commit, How::KilledBefore));
    assert_source_runs_on(&mut pair);
}

#[test]
fn a_commit_that_did_not_get_through_gives_the_guest_back_when_the_target_is_asked() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::CutAfter(Link::Control, End::Target, 3));
    pair.run();
    assert!(pair.has(Moment::Committed) && pair.has(Moment::Asks));
    assert_eq!(pair.outcome().owner, Owner::Source);
    assert_eq!(pair.guest_runs_at(), Some(End::Source));
    assert!(pair.target_vm_ended());
}

#[test]
fn an_answer_to_commit_that_is_lost_is_asked_for() {
    let mut pair = pair_at(Moment::Recorded);
    pair.inflict(Fault::Cut(Link::Control));
    pair.run();
    assert!(pair.has(Moment::Asks));
    assert_eq!(pair.outcome().owner, Owner::Target);
    assert_eq!(pair.guest_runs_at(), Some(End::Target));
    assert!(pair.source_vm_ended(), "also without a connection to confirm on");
}

#[test]
fn a_commit_into_a_dead_network_leaves_the_guest_stopped_at_the_source_until_somebody_asks() {
    let mut pair = pair_at(Moment::Committed);
    pair.inflict(Fault::NetworkDown(Duration::from_secs(14)));
    pair.run_until(Moment::SourceOver);
    assert_eq!(pair.outcome().owner, Owner::InDoubt);
    assert_ne!(pair.guest_runs_at(), Some(End::Source));
    pair.run();
    assert!(matches!(pair.answer(), None | Some(TargetState::NeverCommitted | TargetState::Running)));
    assert!(pair.guest_runs_at().is_some(), "{}", pair.log());
}

#[test]
fn a_question_before_the_commit_arrives_keeps_the_commit_from_counting() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::Stall(Link::Control, End::Target, Duration::from_secs(2)));
    pair.run_until(Moment::Committed);
    pair.inflict(Fault::Ask);
    pair.run();
    assert_eq!(pair.answer(), Some(TargetState::NeverCommitted));
    assert_eq!(pair.guest_runs_at(), Some(End::Source));
    assert!(!pair.has(Moment::Recorded));
}

#[test]
fn a_question_behind_the_commit_waits_until_the_guest_runs() {
    let mut pair = pair_at(Moment::Recorded);
    pair.inflict(Fault::Ask);
    pair.run();
    assert_eq!(pair.answer(), Some(TargetState::Running));
    assert_eq!(pair.guest_runs_at(), Some(End::Target));
}

#[test]
fn a_guest_that_the_target_refuses_to_start_is_given_back() {
    for op in [TargetOp::Record, TargetOp::Start] {
        let mut pair = pair_at(Moment::Ready);
        pair.inflict(Fault::TargetFails(op, How::Undone));
        pair.run();
        assert!(pair.has(Moment::Committed));
        assert_eq!(pair.outcome().owner, Owner::Source);
        assert_eq!(pair.guest_runs_at(), Some(End::Source));
        assert!(pair.target_vm_ended());
    }
}

#[test]
fn a_guest_that_may_have_run_at_the_target_never_goes_back_to_the_source() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::TargetFails(TargetOp::Start, How::Done));
    pair.run();
    assert_eq!(pair.outcome().owner, Owner::InDoubt);
    assert!(matches!(pair.target_outcome(), Some(TargetOutcome::InDoubt(_))));
    assert_ne!(pair.guest_runs_at(), Some(End::Source));
}

#[test]
fn a_target_vm_that_neither_starts_nor_ends_leaves_the_guest_in_doubt() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::TargetFails(TargetOp::Start, How::Undone));
    pair.inflict(Fault::TargetFails(TargetOp::End, How::Undone));
    pair.run();
    assert_eq!(pair.outcome().owner, Owner::InDoubt);
    assert!(matches!(pair.target_outcome(), Some(TargetOutcome::InDoubt(_))));
    assert_eq!(pair.guest_runs_at(), None);
}

#[test]
fn a_target_that_is_killed_between_commit_and_start_leaves_the_guest_in_doubt() {
    let mut pair = pair_at(Moment::Ready);
    pair.inflict(Fault::TargetFails(TargetOp::Start, How::KilledBefore));
    pair.run();
    assert_eq!(pair.outcome().owner, Owner::InDoubt);
    assert_eq!(pair.guest_runs_at(), None);
}

#[test]
fn a_watchdog_that_is_lost_at_the_commit_leaves_the_answer_to_the_target() {
    for (how, end) in [(How::Undone, End::Source), (How::Done, End::Target)] {
        let mut pair = pair_at(Moment::Ready);
        pair.inflict(Fault::SourceFails(SourceOp::Commit, how));
        pair.run();
        assert!(pair.has(Moment::Asks));
        assert_eq!(pair.guest_runs_at(), Some(end));
    }
}

// Row: the target says running. Nothing takes the guest from it any more.

#[test]
fn a_guest_that_runs_at_the_target_stays_there_whatever_happens_to_the_source() {
    for moment in [Moment::Started, Moment::Told, Moment::Confirmed] {
        for fault in [Fault::Kill(End::Source), Fault::Cut(Link::Control), Fault::Cancel(End::Source)] {
            let mut pair = pair_at(moment);
            pair.inflict(fault);
            pair.run();
            assert_eq!(pair.guest_runs_at(), Some(End::Target));
        }
    }
}

#[test]
fn an_operator_who_ends_the_target_behind_the_commit_does_not_keep_the_word_from_the_source() {
    for moment in [Moment::Committed, Moment::Recorded, Moment::Started, Moment::Told] {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::Cancel(End::Target));
        pair.run();
        let at_target = pair.guest_runs_at() == Some(End::Target);
        assert_eq!(at_target, pair.outcome().owner == Owner::Target, "{moment:?}\n{}", pair.log());
    }
}

#[test]
fn a_target_whose_source_died_answers_whoever_asks() {
    let mut pair = pair_at(Moment::Started);
    pair.inflict(Fault::Kill(End::Source));
    pair.inflict(Fault::Ask);
    pair.run();
    assert_eq!(pair.answer(), Some(TargetState::Running));
    assert_eq!(pair.target_outcome(), Some(TargetOutcome::Running));
}

#[test]
fn a_source_vm_that_does_not_end_changes_nothing_for_the_guest() {
    let mut pair = pair_at(Moment::Told);
    pair.inflict(Fault::SourceFails(SourceOp::Retire, How::Undone));
    pair.run();
    assert_eq!(pair.outcome().owner, Owner::Target);
    assert_eq!(pair.guest_runs_at(), Some(End::Target));
}

// Peers that lie.

#[test]
fn a_target_that_is_ready_before_it_has_the_ram_is_not_believed() {
    for moment in [Moment::Agreed, Moment::Round(1), Moment::Saved] {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::Forge(End::Source, Message::Ready { load_ms: 1 }));
        assert_source_runs_on(&mut pair);
        assert!(!pair.has(Moment::Committed));
    }
}

#[test]
fn a_target_that_gives_back_what_it_was_not_given_is_not_believed() {
    let session = wire::Session([7; 16]);
    for message in [Message::Running, Message::Answer { session, state: TargetState::NeverCommitted }] {
        let mut pair = pair_at(Moment::Round(1));
        pair.inflict(Fault::Forge(End::Source, message));
        assert_source_runs_on(&mut pair);
        assert!(!pair.has(Moment::Committed));
    }
}

#[test]
fn a_commit_before_the_target_is_ready_is_none() {
    for moment in [Moment::Agreed, Moment::Round(1), Moment::Finished] {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::Forge(End::Target, Message::Commit));
        assert_source_runs_on(&mut pair);
    }
}

#[test]
fn a_commit_that_comes_twice_starts_the_guest_once() {
    let mut pair = pair_at(Moment::Committed);
    pair.inflict(Fault::Forge(End::Target, Message::Commit));
    pair.run();
    assert_eq!(pair.guest_runs_at(), Some(End::Target));
    assert_eq!(pair.outcome().owner, Owner::Target);
}

#[test]
fn a_stranger_who_asks_and_confirms_changes_nothing() {
    for moment in BEFORE_COMMIT {
        let mut pair = pair_at(moment);
        pair.inflict(Fault::AskAsStranger);
        pair.run();
        assert_eq!(pair.guest_runs_at(), Some(End::Target));
        assert_eq!(pair.outcome().owner, Owner::Target);
    }
}

#[test]
fn a_page_that_was_changed_on_the_way_is_found_by_verify() {
    let mut pair = Pair::new(Seed(7)).with_verify();
    pair.run_until(Moment::Saved);
    // In the payload of the next packet, behind its header of 320 + 8 * 8 bytes.
    pair.inflict(Fault::Flip(Link::Channel(0), End::Target, 500, 1));
    pair.inflict(Fault::Flip(Link::Channel(1), End::Target, 500, 1));
    assert_source_runs_on(&mut pair);
}

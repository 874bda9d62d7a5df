//! The protocol of a slot as a pure state machine: which process may access its bytes, and when. No I/O.
//!
//! ```text
//!            claim                publish              take                release
//!   Empty ----------> Filling ------------> Full ------------> Encoding ------------> Released
//!     ^                  |                   ^  |                 |                      |
//!     |     abandon      |                   |  |  claim (drop)   |      claim           |
//!     +------------------+                   |  +--> Filling      |  +-------------------+
//!                                            +--------------------+  v
//!                                                  give back      Filling
//! ```
//!
//! The trainer claims, publishes and abandons; the agent takes, releases and gives back. Only the trainer writes bytes,
//! and only in *Filling*. The bytes are complete in *Full*, *Encoding* and *Released*.
//!
//! State and generation of a slot are one atomic word, and each transition is one compare-and-swap. This word is the
//! commit flag of a copy: it is written last, with release ordering. A process that dies leaves the word unchanged. An
//! incomplete copy therefore stays *Filling*, and the next trainer abandons it. The test below enumerates every
//! interleaving of both sides, with a death at every point.

/// State of a slot's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum SlotState {
    /// No state.
    Empty,
    /// The trainer is copying into the slot; the bytes are incomplete.
    Filling,
    /// Complete, and waiting for the agent.
    Full,
    /// Complete; the agent is reading the bytes.
    Encoding,
    /// Complete; the agent no longer needs the bytes. The slot may serve a restore, or be filled again.
    Released,
}

impl SlotState {
    const ALL: [Self; 5] = [Self::Empty, Self::Filling, Self::Full, Self::Encoding, Self::Released];

    /// Whether all bytes are present.
    pub(crate) fn is_complete(self) -> bool {
        matches!(self, Self::Full | Self::Encoding | Self::Released)
    }

    /// Whether the agent still has to encode the bytes.
    pub(crate) fn is_pending(self) -> bool {
        matches!(self, Self::Full | Self::Encoding)
    }

    /// The name in status reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Filling => "filling",
            Self::Full => "full",
            Self::Encoding => "encoding",
            Self::Released => "released",
        }
    }
}

/// State and generation of a slot: the content of its atomic word. Generations number the saves of an arena from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SlotWord {
    pub state: SlotState,
    pub generation: u64,
}

impl SlotWord {
    /// Encodes the word for the arena.
    pub(crate) fn to_bits(self) -> u64 {
        self.generation << 8 | self.state as u64
    }

    /// Decodes a word of the arena; `None` if this protocol never writes these bits.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        let state = SlotState::ALL.into_iter().find(|state| *state as u64 == bits & 0xff)?;
        Some(Self { state, generation: bits >> 8 })
    }

    /// The word after a transition; `None` if the protocol forbids the transition.
    pub(crate) fn after(self, transition: Transition) -> Option<Self> {
        let to = |state| Some(Self { state, ..self });
        match (transition, self.state) {
            (Transition::Claim { generation }, SlotState::Empty | SlotState::Released | SlotState::Full) => {
                Some(Self { state: SlotState::Filling, generation })
            }
            (Transition::Publish, SlotState::Filling) => to(SlotState::Full),
            (Transition::Abandon, SlotState::Filling) => to(SlotState::Empty),
            (Transition::Take, SlotState::Full) => to(SlotState::Encoding),
            (Transition::Release, SlotState::Encoding) => to(SlotState::Released),
            (Transition::GiveBack, SlotState::Encoding) => to(SlotState::Full),
            _ => None,
        }
    }
}

/// A transition of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transition {
    /// The trainer begins to fill the slot.
    Claim { generation: u64 },
    /// The trainer has copied everything.
    Publish,
    /// The trainer gives up a copy: its own, or one of a predecessor that died.
    Abandon,
    /// The agent begins to read the slot.
    Take,
    /// The agent no longer needs the slot.
    Release,
    /// The agent could not encode the slot, or a predecessor that died had not finished.
    GiveBack,
}

/// Slots that a save may claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Claimable {
    /// Slots that are empty or released.
    Free,
    /// Free slots, else the oldest slot that the agent has not begun to encode.
    FreeOrFull,
}

/// Chooses the slot for the next save: an empty slot, else the released slot with the lowest generation, else, if
/// allowed, the full slot with the lowest generation. `None` means that the trainer must wait or skip the save.
pub(crate) fn choose_slot(words: &[SlotWord], claimable: Claimable) -> Option<usize> {
    let rank = |word: &SlotWord| match word.state {
        SlotState::Empty => Some(0),
        SlotState::Released => Some(1),
        SlotState::Full if claimable == Claimable::FreeOrFull => Some(2),
        _ => None,
    };
    let candidates = words.iter().enumerate().filter_map(|(at, word)| Some((rank(word)?, word.generation, at)));
    candidates.min().map(|(_, _, at)| at)
}

/// The generation of the next save.
pub(crate) fn next_generation(words: &[SlotWord]) -> u64 {
    words.iter().map(|word| word.generation).max().unwrap_or(0) + 1
}

/// Chooses the slot that the agent encodes next: the full slot with the lowest generation.
pub(crate) fn next_to_encode(words: &[SlotWord]) -> Option<usize> {
    let full = words.iter().enumerate().filter(|(_, word)| word.state == SlotState::Full);
    full.min_by_key(|(_, word)| word.generation).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Complete slots, newest first.
    fn complete(words: &[SlotWord]) -> Vec<usize> {
        let mut found: Vec<usize> = words.iter().enumerate().filter(|(_, word)| word.state.is_complete()).map(|(at, _)| at).collect();
        found.sort_by_key(|at| std::cmp::Reverse(words.get(*at).map(|word| word.generation)));
        found
    }

    #[test]
    fn words_round_trip_through_bits() {
        for state in SlotState::ALL {
            for generation in [0, 1, 77, (1 << 56) - 1] {
                let word = SlotWord { state, generation };
                assert_eq!(SlotWord::from_bits(word.to_bits()), Some(word));
            }
        }
        assert_eq!((SlotWord::from_bits(5), SlotWord::from_bits(0)), (None, Some(SlotWord { state: SlotState::Empty, generation: 0 })));
    }

    /// Saves in the model. Deaths may use up further generations.
    const SAVES: u8 = 4;
    const DEATHS: u8 = 2;

    /// Position of the trainer in a save. `seen` is the word that its compare-and-swap expects.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Trainer {
        Idle,
        Chosen { slot: usize, seen: SlotWord, generation: u64 },
        FirstHalf { slot: usize, generation: u64 },
        SecondHalf { slot: usize, generation: u64 },
        Publish { slot: usize, generation: u64 },
        Dead,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Agent {
        Idle,
        Chosen { slot: usize, seen: SlotWord },
        ReadFirst { slot: usize, generation: u64 },
        ReadSecond { slot: usize, generation: u64, first: u64 },
        Done { slot: usize, seen: SlotWord },
        Dead,
    }

    /// Everything that both processes, and a third that restores, can see. The bytes of a slot are two halves, each
    /// with a generation.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct Model {
        words: Vec<SlotWord>,
        bytes: Vec<[u64; 2]>,
        trainer: Trainer,
        agent: Agent,
        saves: u8,
        deaths: u8,
        /// Generation of the newest acknowledged save.
        acknowledged: u64,
        /// Newest generation that the agent has encoded, and keeps for ever.
        encoded: u64,
    }

    impl Model {
        fn swap(&mut self, slot: usize, seen: SlotWord, transition: Transition) -> bool {
            if self.words[slot] != seen {
                return false;
            }
            self.words[slot] = seen.after(transition).expect("a transition that the protocol forbids");
            true
        }

        /// Checks what a process would find that restores now: every slot in a complete state is complete.
        fn check(&self, claimable: Claimable) {
            for (word, bytes) in self.words.iter().zip(&self.bytes) {
                if word.state.is_complete() {
                    assert_eq!(*bytes, [word.generation; 2], "an incomplete copy looks complete: {self:?}");
                }
            }
            let newest = complete(&self.words).first().map_or(0, |&at| self.words[at].generation).max(self.encoded);
            // A trainer that may drop full slots gives up the older save while it makes the newer one.
            if claimable == Claimable::Free {
                assert!(newest >= self.acknowledged, "save {} was acknowledged and is lost: {self:?}", self.acknowledged);
            } else {
                assert!(newest > 0 || self.acknowledged == 0, "nothing is left: {self:?}");
            }
        }

        fn trainer_moves(&self, claimable: Claimable) -> Vec<Model> {
            let mut after = Vec::new();
            let mut go = |change: &dyn Fn(&mut Model)| {
                let mut next = self.clone();
                change(&mut next);
                after.push(next);
            };
            match self.trainer {
                Trainer::Idle if self.saves < SAVES => {
                    if let Some(slot) = choose_slot(&self.words, claimable) {
                        let seen = self.words[slot];
                        let generation = next_generation(&self.words);
                        go(&|m| m.trainer = Trainer::Chosen { slot, seen, generation });
                    }
                }
                Trainer::Idle => {}
                Trainer::Chosen { slot, seen, generation } => go(&|m| {
                    m.trainer = match m.swap(slot, seen, Transition::Claim { generation }) {
                        true => Trainer::FirstHalf { slot, generation },
                        false => Trainer::Idle,
                    }
                }),
                // The halves of a copy may become visible in any order.
                Trainer::FirstHalf { slot, generation } => {
                    for half in 0..2 {
                        go(&|m| {
                            m.bytes[slot][half] = generation;
                            m.trainer = Trainer::SecondHalf { slot, generation };
                        });
                    }
                }
                Trainer::SecondHalf { slot, generation } => go(&|m| {
                    m.bytes[slot] = [generation; 2];
                    m.trainer = Trainer::Publish { slot, generation };
                }),
                Trainer::Publish { slot, generation } => go(&|m| {
                    let seen = SlotWord { state: SlotState::Filling, generation };
                    assert!(m.swap(slot, seen, Transition::Publish), "another process changed a slot that is being filled: {m:?}");
                    (m.trainer, m.saves, m.acknowledged) = (Trainer::Idle, m.saves + 1, generation);
                }),
                // The next trainer first abandons incomplete copies.
                Trainer::Dead => go(&|m| {
                    for slot in 0..m.words.len() {
                        let seen = m.words[slot];
                        if seen.state == SlotState::Filling {
                            assert!(m.swap(slot, seen, Transition::Abandon));
                        }
                    }
                    m.trainer = Trainer::Idle;
                }),
            }
            if self.trainer != Trainer::Dead && self.deaths < DEATHS {
                go(&|m| (m.trainer, m.deaths) = (Trainer::Dead, m.deaths + 1));
            }
            after
        }

        fn agent_moves(&self) -> Vec<Model> {
            let mut after = Vec::new();
            let mut go = |change: &dyn Fn(&mut Model)| {
                let mut next = self.clone();
                change(&mut next);
                after.push(next);
            };
            match self.agent {
                Agent::Idle => {
                    if let Some(slot) = next_to_encode(&self.words) {
                        let seen = self.words[slot];
                        go(&|m| m.agent = Agent::Chosen { slot, seen });
                    }
                }
                Agent::Chosen { slot, seen } => go(&|m| {
                    m.agent = match m.swap(slot, seen, Transition::Take) {
                        true => Agent::ReadFirst { slot, generation: seen.generation },
                        // The trainer dropped the state.
                        false => Agent::Idle,
                    }
                }),
                Agent::ReadFirst { slot, generation } => {
                    go(&|m| m.agent = Agent::ReadSecond { slot, generation, first: m.bytes[slot][0] });
                    // Encoding may fail.
                    let seen = SlotWord { state: SlotState::Encoding, generation };
                    go(&|m| {
                        assert!(m.swap(slot, seen, Transition::GiveBack));
                        m.agent = Agent::Idle;
                    });
                }
                Agent::ReadSecond { slot, generation, first } => go(&|m| {
                    assert_eq!([first, m.bytes[slot][1]], [generation; 2], "the agent read an incomplete copy: {m:?}");
                    m.encoded = m.encoded.max(generation);
                    m.agent = Agent::Done { slot, seen: SlotWord { state: SlotState::Encoding, generation } };
                }),
                Agent::Done { slot, seen } => go(&|m| {
                    assert!(m.swap(slot, seen, Transition::Release), "another process changed a slot that is being encoded: {m:?}");
                    m.agent = Agent::Idle;
                }),
                Agent::Dead => go(&|m| {
                    for slot in 0..m.words.len() {
                        let seen = m.words[slot];
                        if seen.state == SlotState::Encoding {
                            assert!(m.swap(slot, seen, Transition::GiveBack));
                        }
                    }
                    m.agent = Agent::Idle;
                }),
            }
            if self.agent != Agent::Dead && self.deaths < DEATHS {
                go(&|m| (m.agent, m.deaths) = (Agent::Dead, m.deaths + 1));
            }
            after
        }
    }

    /// Visits all reachable states; returns their number.
    fn explore(slots: usize, claimable: Claimable) -> usize {
        let empty = SlotWord { state: SlotState::Empty, generation: 0 };
        let first = Model {
            words: vec![empty; slots],
            bytes: vec![[0; 2]; slots],
            trainer: Trainer::Idle,
            agent: Agent::Idle,
            saves: 0,
            deaths: 0,
            acknowledged: 0,
            encoded: 0,
        };
        let mut known = HashSet::from([first.clone()]);
        let mut open = vec![first];
        while let Some(model) = open.pop() {
            model.check(claimable);
            let next: Vec<Model> = model.trainer_moves(claimable).into_iter().chain(model.agent_moves()).collect();
            // The model may stop only when everything is saved and encoded.
            let finished = model.saves == SAVES && next_to_encode(&model.words).is_none();
            assert!(finished || !next.is_empty(), "both sides wait: {model:?}");
            open.extend(next.into_iter().filter(|next| known.insert(next.clone())));
        }
        known.len()
    }

    #[test]
    fn no_interleaving_loses_an_acknowledged_save() {
        assert!(explore(1, Claimable::Free) > 100);
        let states = [(2, Claimable::Free), (3, Claimable::Free), (2, Claimable::FreeOrFull), (3, Claimable::FreeOrFull)]
            .map(|(slots, claimable)| explore(slots, claimable));
        assert!(states.iter().all(|&count| count > 1000), "{states:?}");
    }

    /// Shows that the model detects a broken protocol.
    #[test]
    #[should_panic(expected = "an incomplete copy looks complete")]
    fn a_commit_flag_written_too_early_is_detected() {
        let word = |state| SlotWord { state, generation: 1 };
        let mut model = Model {
            words: vec![word(SlotState::Empty)],
            bytes: vec![[0; 2]],
            trainer: Trainer::FirstHalf { slot: 0, generation: 1 },
            agent: Agent::Idle,
            saves: 0,
            deaths: 0,
            acknowledged: 0,
            encoded: 0,
        };
        model.words[0] = word(SlotState::Full);
        model.trainer_moves(Claimable::Free).iter().for_each(|next| next.check(Claimable::Free));
    }
}

//! The protocol of a slot, as a pure state machine: who may touch its bytes, and when. No I/O.
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
//! The trainer claims, publishes and abandons; the agent takes, releases and gives back. Bytes are written in *Filling* alone, by the
//! trainer; they are whole in *Full*, *Encoding* and *Released*. The state and the generation of a slot are one atomic word, and each
//! transition is one compare-and-swap: the commit flag of a copy is this word, written last, with release ordering. A process that dies
//! leaves the word as it is: a copy that was torn stays *Filling*, and whoever comes after abandons it. The test below walks through
//! every interleaving of both sides, with a death at every point.

/// What a slot is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum State {
    /// Holds nothing.
    Empty,
    /// The trainer copies into it; the bytes are torn.
    Filling,
    /// Whole, and waiting for the agent.
    Full,
    /// Whole; the agent reads it.
    Encoding,
    /// Whole; the agent needs it no more. It may be restored from, or filled again.
    Released,
}

impl State {
    const ALL: [Self; 5] = [Self::Empty, Self::Filling, Self::Full, Self::Encoding, Self::Released];

    /// Whether all bytes are there.
    pub(crate) fn is_whole(self) -> bool {
        matches!(self, Self::Full | Self::Encoding | Self::Released)
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

/// State and generation of a slot: what its atomic word says. Generations count the saves of an arena, from 1 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Word {
    pub state: State,
    pub generation: u64,
}

impl Word {
    /// As the arena holds it.
    pub(crate) fn to_bits(self) -> u64 {
        self.generation << 8 | self.state as u64
    }

    /// From what the arena holds; none if that was never written by this protocol.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        let state = State::ALL.into_iter().find(|state| *state as u64 == bits & 0xff)?;
        Some(Self { state, generation: bits >> 8 })
    }

    /// The word after a move; none where the protocol forbids it.
    pub(crate) fn after(self, step: Move) -> Option<Self> {
        let to = |state| Some(Self { state, ..self });
        match (step, self.state) {
            (Move::Claim { generation }, State::Empty | State::Released | State::Full) => Some(Self { state: State::Filling, generation }),
            (Move::Publish, State::Filling) => to(State::Full),
            (Move::Abandon, State::Filling) => to(State::Empty),
            (Move::Take, State::Full) => to(State::Encoding),
            (Move::Release, State::Encoding) => to(State::Released),
            (Move::GiveBack, State::Encoding) => to(State::Full),
            _ => None,
        }
    }
}

/// What a process does with a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Move {
    /// Trainer: begins to fill it.
    Claim { generation: u64 },
    /// Trainer: the copy is whole.
    Publish,
    /// Trainer: gives up a copy, its own or that of its dead predecessor.
    Abandon,
    /// Agent: begins to read it.
    Take,
    /// Agent: needs it no more.
    Release,
    /// Agent: could not encode it, or its dead predecessor did not.
    GiveBack,
}

/// The slot that the next save fills: an empty one, else the oldest that the agent has released, else, if `drop`, the oldest that it has
/// not begun with. None: the trainer has to wait, or to skip.
pub(crate) fn choose(words: &[Word], drop: bool) -> Option<usize> {
    let rank = |word: &Word| match word.state {
        State::Empty => Some(0),
        State::Released => Some(1),
        State::Full if drop => Some(2),
        _ => None,
    };
    let candidates = words.iter().enumerate().filter_map(|(at, word)| Some((rank(word)?, word.generation, at)));
    candidates.min().map(|(_, _, at)| at)
}

/// The generation of the next save.
pub(crate) fn next_generation(words: &[Word]) -> u64 {
    words.iter().map(|word| word.generation).max().unwrap_or(0) + 1
}

/// The slot that the agent encodes next: the oldest that is full.
pub(crate) fn next_to_encode(words: &[Word]) -> Option<usize> {
    let full = words.iter().enumerate().filter(|(_, word)| word.state == State::Full);
    full.min_by_key(|(_, word)| word.generation).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Whole slots, newest first.
    fn whole(words: &[Word]) -> Vec<usize> {
        let mut found: Vec<usize> = words.iter().enumerate().filter(|(_, word)| word.state.is_whole()).map(|(at, _)| at).collect();
        found.sort_by_key(|at| std::cmp::Reverse(words.get(*at).map(|word| word.generation)));
        found
    }

    #[test]
    fn words_survive_their_bits() {
        for state in State::ALL {
            for generation in [0, 1, 77, (1 << 56) - 1] {
                let word = Word { state, generation };
                assert_eq!(Word::from_bits(word.to_bits()), Some(word));
            }
        }
        assert_eq!((Word::from_bits(5), Word::from_bits(0)), (None, Some(Word { state: State::Empty, generation: 0 })));
    }

    /// Saves in the model: generations go up to this, unless deaths use some up.
    const SAVES: u8 = 4;
    const DEATHS: u8 = 2;

    /// Where the trainer is. `seen`: the word that its compare-and-swap expects.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Trainer {
        Idle,
        Chosen { slot: usize, seen: Word, generation: u64 },
        FirstHalf { slot: usize, generation: u64 },
        SecondHalf { slot: usize, generation: u64 },
        Publish { slot: usize, generation: u64 },
        Dead,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    enum Agent {
        Idle,
        Chosen { slot: usize, seen: Word },
        ReadFirst { slot: usize, generation: u64 },
        ReadSecond { slot: usize, generation: u64, first: u64 },
        Done { slot: usize, seen: Word },
        Dead,
    }

    /// All that two processes and a restoring one can see. A slot's bytes are two halves, each of some generation.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct Model {
        words: Vec<Word>,
        bytes: Vec<[u64; 2]>,
        trainer: Trainer,
        agent: Agent,
        saves: u8,
        deaths: u8,
        /// The newest save that was acknowledged.
        acknowledged: u64,
        /// Encoded by the agent, which has it for ever.
        encoded: u64,
    }

    impl Model {
        fn swap(&mut self, slot: usize, seen: Word, step: Move) -> bool {
            if self.words[slot] != seen {
                return false;
            }
            self.words[slot] = seen.after(step).expect("a move that the protocol forbids");
            true
        }

        /// What a process that restores now finds: every slot that claims to be whole is.
        fn check(&self, drop: bool) {
            for (word, bytes) in self.words.iter().zip(&self.bytes) {
                if word.state.is_whole() {
                    assert_eq!(*bytes, [word.generation; 2], "a torn copy looks whole: {self:?}");
                }
            }
            let newest = whole(&self.words).first().map_or(0, |&at| self.words[at].generation).max(self.encoded);
            // With `drop`, the trainer itself gave up the older save while it makes the newer.
            if !drop {
                assert!(newest >= self.acknowledged, "save {} was acknowledged and is gone: {self:?}", self.acknowledged);
            } else {
                assert!(newest > 0 || self.acknowledged == 0, "nothing is left: {self:?}");
            }
        }

        fn trainer_moves(&self, drop: bool) -> Vec<Model> {
            let mut after = Vec::new();
            let mut go = |change: &dyn Fn(&mut Model)| {
                let mut next = self.clone();
                change(&mut next);
                after.push(next);
            };
            match self.trainer {
                Trainer::Idle if self.saves < SAVES => {
                    if let Some(slot) = choose(&self.words, drop) {
                        let (seen, generation) = (self.words[slot], next_generation(&self.words));
                        go(&|m| m.trainer = Trainer::Chosen { slot, seen, generation });
                    }
                }
                Trainer::Idle => {}
                Trainer::Chosen { slot, seen, generation } => go(&|m| {
                    m.trainer = match m.swap(slot, seen, Move::Claim { generation }) {
                        true => Trainer::FirstHalf { slot, generation },
                        false => Trainer::Idle,
                    }
                }),
                // The stores of a copy may become visible in any order.
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
                    let seen = Word { state: State::Filling, generation };
                    assert!(m.swap(slot, seen, Move::Publish), "somebody else touched a slot that is being filled: {m:?}");
                    (m.trainer, m.saves, m.acknowledged) = (Trainer::Idle, m.saves + 1, generation);
                }),
                // The next trainer first abandons what its predecessor left torn.
                Trainer::Dead => go(&|m| {
                    for slot in 0..m.words.len() {
                        let seen = m.words[slot];
                        if seen.state == State::Filling {
                            assert!(m.swap(slot, seen, Move::Abandon));
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
                    m.agent = match m.swap(slot, seen, Move::Take) {
                        true => Agent::ReadFirst { slot, generation: seen.generation },
                        // The trainer dropped it.
                        false => Agent::Idle,
                    }
                }),
                Agent::ReadFirst { slot, generation } => {
                    go(&|m| m.agent = Agent::ReadSecond { slot, generation, first: m.bytes[slot][0] });
                    // Encoding may fail.
                    let seen = Word { state: State::Encoding, generation };
                    go(&|m| {
                        assert!(m.swap(slot, seen, Move::GiveBack));
                        m.agent = Agent::Idle;
                    });
                }
                Agent::ReadSecond { slot, generation, first } => go(&|m| {
                    assert_eq!([first, m.bytes[slot][1]], [generation; 2], "the agent read a torn copy: {m:?}");
                    m.encoded = m.encoded.max(generation);
                    m.agent = Agent::Done { slot, seen: Word { state: State::Encoding, generation } };
                }),
                Agent::Done { slot, seen } => go(&|m| {
                    assert!(m.swap(slot, seen, Move::Release), "somebody else touched a slot that is being encoded: {m:?}");
                    m.agent = Agent::Idle;
                }),
                Agent::Dead => go(&|m| {
                    for slot in 0..m.words.len() {
                        let seen = m.words[slot];
                        if seen.state == State::Encoding {
                            assert!(m.swap(slot, seen, Move::GiveBack));
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

    /// Walks through all states that can be reached; their number.
    fn explore(slots: usize, drop: bool) -> usize {
        let empty = Word { state: State::Empty, generation: 0 };
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
            model.check(drop);
            let next: Vec<Model> = model.trainer_moves(drop).into_iter().chain(model.agent_moves()).collect();
            // Only a run in which everything is saved and encoded ends.
            let finished = model.saves == SAVES && next_to_encode(&model.words).is_none();
            assert!(finished || !next.is_empty(), "both sides wait: {model:?}");
            open.extend(next.into_iter().filter(|next| known.insert(next.clone())));
        }
        known.len()
    }

    #[test]
    fn every_interleaving_with_deaths_at_every_point() {
        let states = [(2, false), (3, false), (2, true), (3, true)].map(|(slots, drop)| explore(slots, drop));
        assert!(states.iter().all(|&count| count > 1000), "{states:?}");
    }

    /// The model is worth something only if it finds a broken protocol.
    #[test]
    #[should_panic(expected = "a torn copy looks whole")]
    fn a_flag_written_too_early_is_found() {
        let word = |state| Word { state, generation: 1 };
        let mut model = Model {
            words: vec![word(State::Empty)],
            bytes: vec![[0; 2]],
            trainer: Trainer::FirstHalf { slot: 0, generation: 1 },
            agent: Agent::Idle,
            saves: 0,
            deaths: 0,
            acknowledged: 0,
            encoded: 0,
        };
        model.words[0] = word(State::Full);
        model.trainer_moves(false).iter().for_each(|next| next.check(false));
    }
}

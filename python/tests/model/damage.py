"""Sequences in which objects of a store are removed, emptied, truncated, damaged and swapped before a verb, and put back after it.

The rules, for each verb:

- Nothing is deleted or changed that a live step needs. A verb that only reads changes nothing.
- A fresh process loads each acknowledged save.
- No wrong numbers: a step is loaded as it was saved, or an error names what is missing.
- A verb that cannot do its work because of the damage ends with an error.
- After the objects are put back, every step can be loaded, and ``verify`` finds nothing.

No reader can notice that the last entries of a log are lost, unless a catalog names them. Only the snapshots of these
entries may then be lost, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import tensorcask

from .places import KINDS, Place
from .savers import LARGE, EngineSaver, Fresh, state_of
from .sequences import Violation
from .truth import Truth, sealed

ROUNDS = 4
HARMS = ("remove", "empty", "truncate", "flip", "swap")
POSITIONS = ("first", "middle", "last", "any", "all")
READING = ("gc", "verify", "doctor", "ls", "log", "restore", "copy")
COMMITTING = ("compact", "forget", "pin", "gc --apply", "doctor --apply")
SAVING = ("fresh save", "living save", "command save", "engine", "living engine")
VERBS = (*READING, *COMMITTING, *SAVING)
AGE = ("--age-floor", "0s")
# Files of people, beside the objects of the store.
FOREIGN = {"casks/notes.txt": b"mine", "snapshots/.DS_Store": b"", "log/old/00000000000000000001.json": b"{}", "todo": b"train"}
COMBINATIONS = [(verb, harm, kind, position) for verb in VERBS for harm in HARMS for kind in KINDS for position in POSITIONS]


@dataclass
class Harm:
    """What was done to some objects."""

    verb: str
    text: str
    originals: dict[str, bytes]
    # What lies there now; objects that are gone are absent.
    left: dict[str, bytes]
    before: Truth
    # The state of the log without lost entries at its end, if nothing in the store tells of them.
    without_end: Truth | None = None
    # New steps that were acknowledged, a step that the agent goes on to save, and steps that were forgotten.
    saved: list[int] = field(default_factory=list)
    waiting: int | None = None
    forgotten: list[int] = field(default_factory=list)

    def touches(self, *kinds: str) -> bool:
        return any(name.startswith(kinds) for name in self.originals)

    @property
    def hit_entries(self) -> list[str]:
        """Entries of which the entry itself is hit, not only the snapshot that it holds."""
        sound = {name: data[: sealed(data)[1]] for name, data in self.originals.items() if name.startswith("log")}
        return [name for name, data in sound.items() if not self.left.get(name, b"").startswith(data)]

    @property
    def hits_log(self) -> bool:
        return bool(self.hit_entries)

    @property
    def rotten(self) -> list[str]:
        """Casks and entries that were read by a writer that lives on, and have kept their size: no writer reads them for each save."""
        same_size = [name for name, data in self.left.items() if len(data) == len(self.originals[name])]
        return [name for name in same_size if name.startswith(("casks", "log"))]

    @property
    def below_catalog(self) -> list[str]:
        """Damaged entries that no reader with the newest catalog reads."""
        return [name for name in self.left if name.startswith("log") and name <= self.before.entry_of_catalog]

    @property
    def seen(self) -> Truth:
        """What any reader can know at best."""
        return self.without_end or self.before

    @property
    def lost_log(self) -> bool:
        """Whether a reader of the whole log has to notice the damage."""
        return self.hits_log and self.without_end is None


class Damages:
    """One sequence on one place."""

    def __init__(self, seed: int, place: Place, fresh: Fresh, template: Mapping[str, bytes], say: Callable[[str], None]) -> None:
        self._random, self._seed = Random(seed), seed
        self._place, self._fresh, self._say = place, fresh, say
        self.outcomes: Counter[str] = Counter()
        self._step = LARGE + 1000
        self._copies = 0
        self._engine: EngineSaver | None = None
        place.fill(template)
        place.fill({name: data for name, data in FOREIGN.items() if self._random.random() < 0.2})
        self._living = tensorcask.Store(place.url)

    def run(self) -> None:
        for round in range(ROUNDS):
            # A stride without common factors: few sequences already try each verb.
            verb, harm, kind, position = COMBINATIONS[(self._seed * ROUNDS + round) * 1009 % len(COMBINATIONS)]
            self._grow()
            # What the writer has cached is what the store has.
            if verb == "living save":
                self._living_save()
            if verb == "living engine":
                self._engine = EngineSaver(self._place.url)
                self._engine.save(self._next())
            try:
                done = self._harm(verb, harm, kind, position)
                if done is not None and not self._round(done):
                    break
            finally:
                if self._engine is not None:
                    self._engine.close()
                    self._engine = None

    # A store without damage, where everything has to work.

    def _next(self) -> int:
        self._step += self._random.choice((1, 1, 4))
        return self._step

    def _living_save(self) -> int:
        step = self._next()
        try:
            self._living.save(state_of(step), step=step, policy="consecutive")
        except tensorcask.FencedError:
            # As the error says.
            self._living = tensorcask.Store(self._place.url)
            self._living.save(state_of(step), step=step)
        return step

    def _grow(self) -> None:
        step = self._next()
        self._fresh.run("save", self._place.url, step)
        self._say(f"saved {step}")
        if self._random.random() < 0.5:
            self._say(f"saved {self._living_save()} by the writer that lives on")
        known = Truth(self._place.objects())
        act = self._random.choice(("none", "compact", "forget", "gc"))
        if act == "compact":
            self._works("compact", self._place.url, "--step", str(self._random.choice(known.steps)))
        elif act == "forget" and len(known.unpinned) > 4:
            self._works("forget", self._place.url, "--step", *map(str, known.unpinned[:-4]))
        elif act == "gc":
            self._works("gc", self._place.url, "--apply", *AGE)

    def _works(self, *words: str) -> None:
        code, text = self._fresh.run("command", list(words))
        self._say(" ".join(words))
        if code != 0:
            raise Violation(f"{words} in a whole store: {text}")

    # Damage.

    def _harm(self, verb: str, harm: str, kind: str, position: str) -> Harm | None:
        objects = self._place.objects()
        names = [name for name in objects if name.startswith(kind) and name not in FOREIGN]
        if not names:
            return None
        at = {"first": 0, "middle": len(names) // 2, "last": len(names) - 1, "any": self._random.randrange(len(names))}.get(position)
        chosen = names if at is None else [names[at]]
        others = {name: objects[self._random.choice(names)] for name in chosen}
        left = {name: bad for name in chosen if (bad := self._bad(harm, objects[name], others[name])) is not None}
        chosen = [name for name in chosen if left.get(name) != objects[name]]
        if not chosen:
            return None
        for name in chosen:
            self._place.write(name, left[name]) if name in left else self._place.unlink(name)
        left = {name: data for name, data in left.items() if name in chosen}
        done = Harm(verb, f"{harm} {position} of {kind}", {name: objects[name] for name in chosen}, left, Truth(objects))
        if not left and kind == "log":
            done.without_end = _without_end(objects, done)
        self._say(f"{done.text}: {', '.join(chosen[:5])}")
        return done

    def _bad(self, harm: str, data: bytes, other: bytes) -> bytes | None:
        if harm == "remove":
            return None
        if harm == "flip":
            at = self._random.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
        if harm == "swap":
            return other
        return data[: 0 if harm == "empty" else self._random.choice((len(data) - 1, len(data) // 2, 1))]

    # A verb in a damaged store, and the store put together again.

    def _round(self, harm: Harm) -> bool:
        """Returns false if the store cannot be put together again, and need not."""
        failed = self._run(harm)
        self.outcomes[f"{harm.verb}: {'failed' if failed else 'worked'}"] += 1
        self._say(f"{harm.verb}: {failed or 'worked'}")
        after = self._place.objects()
        self._check_objects(harm, after, failed)
        self._check_reading(harm)
        if not self._put_back(harm, after):
            return False
        self._check_whole(harm)
        return True

    def _fail(self, harm: Harm, what: str) -> Violation:
        return Violation(f"[{harm.verb}, {harm.text}] {what}")

    def _run(self, harm: Harm) -> str:
        """Runs the verb and checks its answer. Returns its error, or an empty text."""
        url, verb, steps = self._place.url, harm.verb, harm.before.steps
        if verb in SAVING:
            return self._save(harm)
        if verb == "restore":
            return self._restore_newest(harm)
        words = verb.split()
        target = ""
        if verb == "copy":
            self._copies += 1
            target = self._place.beside(f"copied-{self._copies}")
            words += [url, target]
        else:
            words += [url]
        if verb in ("compact", "pin"):
            words += ["--step", str(self._random.choice(steps))]
        if verb == "forget":
            words += ["--step", str(harm.before.unpinned[0])]
        if "gc" in verb or "doctor" in verb:
            words += AGE
        code, text = self._fresh.run("command", words)
        if "panicked" in text or (code != 0 and not text.strip()):
            raise self._fail(harm, f"exit code {code}: {text}")
        if code == 0:
            if verb == "forget":
                harm.forgotten.append(harm.before.unpinned[0])
            if verb == "copy" and (failures := self._fresh.run("steps", target, harm.seen.steps)):
                raise self._fail(harm, f"exit code 0, and the copy lacks steps: {failures}")
            if self._has_to_notice(harm):
                raise self._fail(harm, f"exit code 0: {text}")
        elif self._has_to_notice(harm) and not any(name.split("/")[-1] in text for name in harm.originals) and "log/" not in text:
            raise self._fail(harm, f"names none of {list(harm.originals)[:3]}: {text}")
        return text if code else ""

    def _has_to_notice(self, harm: Harm) -> bool:
        verb = harm.verb
        if harm.without_end is not None:
            return False
        of_steps = set().union(*map(harm.before.needs, harm.before.steps))
        needed = harm.touches("store.json") or harm.hits_log or bool(of_steps & set(harm.originals))
        if verb == "verify":
            return needed or bool(harm.left and harm.touches("catalog"))
        if verb.startswith("doctor"):
            return needed and not harm.left
        if verb.startswith("gc"):
            # It looks whether each entry is there, and takes from the newest catalog what the entries before it say.
            return harm.lost_log and not set(harm.hit_entries) <= set(harm.below_catalog)
        if verb.startswith("log"):
            return harm.lost_log
        return False

    def _save(self, harm: Harm) -> str:
        step, url = self._next(), self._place.url
        try:
            if harm.verb == "engine":
                found, failed = self._fresh.run("engine", url, step)
                if "NotFound" in found and harm.without_end is None:
                    raise self._fail(harm, f"the engine takes it for a first start: {found}")
                if failed:
                    return str(failed)
            elif self._engine is not None:
                if failed := self._engine.try_save(step):
                    harm.waiting = step
                    return failed
            elif harm.verb == "command save":
                self._fresh.run("save by command", url, step)
            elif harm.verb == "fresh save":
                self._fresh.run("save", url, step)
            else:
                self._living.save(state_of(step), step=step, policy="consecutive")
        except (tensorcask.Error, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, RuntimeError) and not isinstance(error, tensorcask.Error):
                raise self._fail(harm, text) from error
            # A writer that lives on makes a lost store.json anew.
            unnamed = harm.touches("store.json") and (harm.left or not harm.verb.startswith("living"))
            if not (unnamed or harm.touches("directories") or harm.hits_log):
                raise self._fail(harm, f"refused a save, which needs none of the damaged objects: {text}") from error
            return text
        self._check_save(harm, step, "")
        catalogs = {name: self._place.read(name) for name in self._place.names("catalog")}
        if catalogs and not harm.below_catalog:
            for name in catalogs:
                self._place.unlink(name)
            self._check_save(harm, step, " without the catalogs")
            self._place.fill(catalogs)
        harm.saved.append(step)
        return ""

    def _check_save(self, harm: Harm, step: int, where: str) -> None:
        try:
            self._fresh.run("check", self._place.url, step)
        except Exception as error:
            if harm.verb.startswith("living") and any(name in str(error) for name in harm.rotten):
                return
            raise self._fail(harm, f"saved step {step}, and a fresh process{where} says: {type(error).__name__}: {error}") from error

    def _restore_newest(self, harm: Harm) -> str:
        try:
            found = self._fresh.run("newest", self._place.url)
        except tensorcask.NotFoundError as error:
            if harm.without_end is None:
                raise self._fail(harm, f"takes a store with steps for an empty one: {error}") from error
            return str(error)
        except tensorcask.Error as error:
            return str(error)
        # A reader stops at an absent entry, and later ones may have forgotten what it finds (log 4.5).
        steps = {snapshot.step for snapshot in harm.before.snapshots.values()} if harm.hits_log else set(harm.before.steps)
        newest = harm.seen.steps[-1]
        if found not in steps or (found != newest and not harm.hits_log and not harm.before.needs(newest) & set(harm.originals)):
            raise self._fail(harm, f"restored step {found} as the newest; {newest} is whole")
        return ""

    def _check_objects(self, harm: Harm, after: Mapping[str, bytes], failed: str) -> None:
        """Nothing is deleted or changed that a live step needs. Who only reads changes nothing."""
        before = {name: data for name, data in harm.before.objects.items() if name not in harm.originals} | harm.left
        gone = {name for name, data in before.items() if after.get(name) != data}
        if harm.verb in READING and before != after:
            raise self._fail(harm, f"changed the store: {gone or set(after) - set(before)}")
        if wrong := (gone & (self._needed(harm) | set(FOREIGN))) - set(harm.originals):
            raise self._fail(harm, f"{'failed, and ' if failed else ''}deleted or changed {sorted(wrong)[:5]}")
        if wrong := {name for name in gone if name in after and name not in harm.originals}:
            raise self._fail(harm, f"wrote something else over {sorted(wrong)[:5]}")

    @staticmethod
    def _needed(harm: Harm) -> set[str]:
        steps = [step for step in harm.seen.steps if step not in harm.forgotten]
        return set(harm.seen.entries).union({"store.json"}, *map(harm.seen.needs, steps))

    def _check_reading(self, harm: Harm) -> None:
        """What does not need the damaged objects can be loaded."""
        steps = [step for step in harm.seen.steps if step not in harm.forgotten]
        failures = self._fresh.run("steps", self._place.url, steps)
        if harm.touches("store.json") or harm.lost_log:
            return
        for step, text in failures.items():
            if not harm.before.needs(step) & set(harm.originals):
                raise self._fail(harm, f"step {step} needs none of the damaged objects: {text}")

    def _put_back(self, harm: Harm, after: Mapping[str, bytes]) -> bool:
        needed = self._needed(harm)
        others = [name for name, data in harm.originals.items() if after.get(name) not in (harm.left.get(name), data)]
        # A collector deletes what is not needed. A writer makes a lost store.json anew.
        others = [name for name in others if (name in after or name in needed) and (name != "store.json" or harm.verb not in SAVING)]
        if others:
            if harm.verb not in READING and harm.without_end is not None:
                self.outcomes["goes on from the entries that are left"] += 1
                return False
            raise self._fail(harm, f"others took the place of lost objects: {others[:5]}")
        # The newest first: a log whose end is still missing looks like an older one, and a living agent would go by it.
        missing = {name: data for name, data in harm.originals.items() if after.get(name) == harm.left.get(name)}
        self._place.fill(dict(sorted(missing.items(), reverse=True)))
        gone = set(harm.before.objects) - set(after) - set(harm.originals)
        # Without the lost entries, a collector takes what only they name for leftovers.
        return harm.without_end is None or not gone

    def _check_whole(self, harm: Harm) -> None:
        if self._engine is not None and harm.waiting is not None:
            reached, text = self._engine.last_outcome()
            self._say(f"the agent goes on: {text}")
            if reached:
                harm.saved.append(harm.waiting)
        steps = [step for step in harm.before.steps if step not in harm.forgotten] + harm.saved
        if failures := self._fresh.run("steps", self._place.url, steps):
            raise self._fail(harm, f"after everything was put back: {failures}")
        if steps and (newest := self._fresh.run("newest", self._place.url)) != steps[-1]:
            raise self._fail(harm, f"after everything was put back, the newest step is {newest} in place of {steps[-1]}")
        code, text = self._fresh.run("command", ["verify", self._place.url])
        if code != 0:
            raise self._fail(harm, f"after everything was put back: {text}")


def _without_end(objects: Mapping[str, bytes], harm: Harm) -> Truth | None:
    """Returns the state of the log that is left if the end of the log is lost, and nothing tells of it."""
    rest = Truth({name: data for name, data in objects.items() if name not in harm.originals})
    entries = harm.before.entries
    if set(entries[: len(rest.entries)]) | set(harm.originals) != set(entries) or rest.entry_of_catalog > f"log/{len(rest.entries):020}.json":
        return None
    others = [name for name in objects if not name.startswith(("log", "store.json"))]
    return rest if rest.entries or not others else None

//! Recipes: all ops that decode a chunk. They cover the chunk's own steps down the chain and those of the partners that
//! codecs need. Built by a loop and never by recursion, so stored data cannot exhaust the stack. Spec: `spec/chain.md`,
//! clause 3, and `spec/codecs.md`, clause 5.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Link;
use super::walk::{ShardPlan, Step};
use crate::codec::{ChunkKind, Registry};
use crate::{Error, Result};

/// Shard rows of the casks that hold a shard, newest first: link, cask, row.
pub(crate) type Rows = Vec<(usize, usize, usize)>;

/// Operation that decodes one stored form of a chunk.
#[derive(Debug)]
pub(crate) struct Op {
    /// Index of the shard's plan.
    pub shard: usize,
    pub step: Step,
    /// Op that produces the base of a delta.
    pub base: Option<usize>,
    pub partners: Vec<PartnerOps>,
    /// Whether another op takes the gradients that the chunk stores.
    pub gives_gradient: bool,
}

impl Op {
    /// Returns the ops whose results this op takes.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = usize> {
        let partners = self.partners.iter().flat_map(|partner| [Some(partner.now), partner.base]);
        partners.chain([self.base]).flatten()
    }
}

/// Ops that produce a partner.
#[derive(Debug)]
pub(crate) struct PartnerOps {
    pub role: &'static str,
    pub shard: usize,
    pub now: usize,
    pub base: Option<usize>,
    /// Whether the codec takes the gradients that the op `now` gives.
    pub gradient: bool,
}

/// Ops, each listed after the ops that it depends on.
#[derive(Debug, Default)]
pub(crate) struct Recipe {
    pub ops: Vec<Op>,
    /// Op of a shard's chunk in a link, if several ops may need it.
    known: HashMap<(usize, usize), usize>,
}

/// Plans of shards and of their partners.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    pub shards: Vec<ShardPlan>,
    pub rows: Vec<Rows>,
    /// Plan of a shard's partner, by shard, link and role.
    partners: BTreeMap<(usize, usize, &'static str), Option<usize>>,
    by_name: HashMap<String, Vec<usize>>,
    /// Union-find forest of the shards whose chunks may need one another; each tree is a family. A shard without
    /// partners has no entry.
    families: HashMap<usize, usize>,
}

/// A step of building a recipe.
enum Task {
    /// Search for the stored form of a shard's chunk in a link.
    Find { shard: usize, link: usize },
    /// Creation of the op of a stored form, with these partners.
    Make { shard: usize, step: Step, partners: Vec<PartnerPlans> },
}

/// A partner of a stored form.
#[derive(Debug, Clone, Copy)]
struct PartnerPlans {
    role: &'static str,
    /// Plan of the partner.
    now: usize,
    /// Plan of the partner in the parent, if it is needed.
    base: Option<usize>,
    /// Whether the partner's gradients are needed.
    gradient: bool,
}

impl Plans {
    pub(crate) fn of(shards: Vec<ShardPlan>) -> Self {
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (number, plan) in shards.iter().enumerate() {
            by_name.entry(plan.name.clone()).or_default().push(number);
        }
        Self { shards, by_name, ..Self::default() }
    }

    /// Returns the family of shards that a shard is decoded with, or `None` for a shard without partners.
    pub(crate) fn family(&self, shard: usize) -> Option<usize> {
        let mut root = *self.families.get(&shard)?;
        while let Some(&next) = self.families.get(&root).filter(|next| **next != root) {
            root = next;
        }
        Some(root)
    }

    fn join(&mut self, ours: usize, theirs: usize) {
        for shard in [ours, theirs] {
            self.families.entry(shard).or_insert(shard);
        }
        if let (Some(ours), Some(theirs)) = (self.family(ours), self.family(theirs)) {
            self.families.insert(theirs, ours);
        }
    }

    /// Adds plans of the partners that a shard's chunks may need, according to the codecs in its casks.
    pub(crate) fn add_partners(&mut self, links: &[impl AsRef<Link>], registry: &Registry, shard: usize) -> Result<()> {
        let Some(plan) = self.shards.get(shard) else { return Ok(()) };
        // A tensor may have had another role in an older link, and a delta looks for its partners in the parent, too.
        let roles: BTreeSet<&str> = (0..links.len()).map(|link| plan.role(links, link)).collect();
        let needs: BTreeSet<&'static str> = roles.iter().flat_map(|role| registry.partner_roles(role)).map(|need| need.role).collect();
        if needs.is_empty() {
            return Ok(());
        }
        let names = |link: usize, cask: usize| {
            let index = links.get(link).and_then(|link| link.as_ref().index(cask));
            let role = plan.role(links, link);
            index.is_some_and(|index| index.codecs().iter().any(|codec| !registry.needs(codec, role).is_empty()))
        };
        if !plan.candidates().iter().any(|&(link, cask)| names(link, cask)) {
            return Ok(());
        }
        let name = plan.name.clone();
        let rect = plan.rect.clone();
        for (at, link) in links.iter().enumerate() {
            let directory = &link.as_ref().directory;
            let Some(tensor) = directory.find(&name) else { continue };
            for &role in &needs {
                if self.partners.contains_key(&(shard, at, role)) {
                    continue;
                }
                let found = directory.partner(tensor, role).and_then(|partner| Some((partner, directory.find_shard(partner, &rect)?)));
                let known = found.and_then(|(partner, _)| {
                    let same = |plan: &ShardPlan| {
                        plan.rect == rect && plan.dtype == directory.dtype(partner) && plan.shape == directory.shape(partner)
                    };
                    let numbers = self.by_name.get(directory.name(partner))?;
                    numbers.iter().copied().find(|&number| self.shards.get(number).is_some_and(same))
                });
                let number = match (found, known) {
                    (None, _) => None,
                    (_, Some(known)) => Some(known),
                    (Some((partner, number)), None) => {
                        let plan = ShardPlan::at(links, at, partner, number)?;
                        let number = self.shards.len();
                        self.by_name.entry(plan.name.clone()).or_default().push(number);
                        self.shards.push(plan);
                        Some(number)
                    }
                };
                self.partners.insert((shard, at, role), number);
                if let Some(number) = number {
                    self.join(shard, number);
                }
            }
        }
        Ok(())
    }

    /// Adds the ops that produce chunk `chunk` of a shard. Returns its op and the CRC-32 of the decoded bytes.
    pub(crate) fn add(
        &self,
        recipe: &mut Recipe,
        links: &[impl AsRef<Link>],
        registry: &Registry,
        shard: usize,
        chunk: u64,
    ) -> Result<(usize, u32)> {
        let (first, crc) = self.stored(links, shard, chunk, 0)?;
        let target = (shard, first.link);
        if self.family(shard).is_none() {
            return Ok((self.add_alone(recipe, links, registry, shard, chunk, first)?, crc));
        }
        // Ops that have been started but not made. Meeting one again means that the ops depend on each other in a
        // cycle.
        let mut under_way: Vec<(usize, usize)> = Vec::new();
        let mut tasks = vec![Task::Find { shard, link: 0 }];
        while let Some(task) = tasks.pop() {
            match task {
                Task::Find { shard, link } => {
                    let (step, _) = self.stored(links, shard, chunk, link)?;
                    let key = (shard, step.link);
                    if recipe.known.contains_key(&key) {
                        continue;
                    }
                    if under_way.contains(&key) {
                        return Err(self.fail(shard, chunk, "the chunk and its partners depend on each other".into()));
                    }
                    under_way.push(key);
                    let mut wanted = Vec::new();
                    if step.entry.kind == ChunkKind::Delta {
                        wanted.push((shard, step.link + 1));
                    }
                    let partners = self.partners_of(links, registry, shard, chunk, &step)?;
                    for partner in &partners {
                        wanted.push((partner.now, step.link));
                        wanted.extend(partner.base.map(|base| (base, step.link + 1)));
                    }
                    tasks.push(Task::Make { shard, step, partners });
                    tasks.extend(wanted.into_iter().map(|(shard, link)| Task::Find { shard, link }));
                }
                Task::Make { shard, step, partners: plans } => {
                    let known = |shard: usize, link: usize| -> Result<usize> {
                        let made = recipe.known.get(&(shard, self.stored(links, shard, chunk, link)?.0.link)).copied();
                        made.ok_or_else(|| Error::invalid("an op comes before an op that it depends on"))
                    };
                    let base = match step.entry.kind {
                        ChunkKind::Delta => Some(known(shard, step.link + 1)?),
                        _ => None,
                    };
                    let mut partners = Vec::new();
                    for PartnerPlans { role, now: partner, base, gradient } in plans {
                        let now = known(partner, step.link)?;
                        let base = base.map(|base| known(base, step.link + 1)).transpose()?;
                        partners.push(PartnerOps { role, shard: partner, now, base, gradient });
                    }
                    under_way.retain(|key| *key != (shard, step.link));
                    for partner in partners.iter().filter(|partner| partner.gradient) {
                        if let Some(op) = recipe.ops.get_mut(partner.now) {
                            op.gives_gradient = true;
                        }
                    }
                    recipe.known.insert((shard, step.link), recipe.ops.len());
                    recipe.ops.push(Op { shard, step, base, partners, gives_gradient: false });
                }
            }
        }
        let made = recipe.known.get(&target).copied();
        Ok((made.ok_or_else(|| Error::invalid("an op is missing"))?, crc))
    }

    /// Adds a chunk that needs only its own steps.
    fn add_alone(
        &self,
        recipe: &mut Recipe,
        links: &[impl AsRef<Link>],
        registry: &Registry,
        shard: usize,
        chunk: u64,
        first: Step,
    ) -> Result<usize> {
        let mut steps = vec![first];
        while let Some(step) = steps.last().filter(|step| step.entry.kind == ChunkKind::Delta) {
            steps.push(self.stored(links, shard, chunk, step.link + 1)?.0);
        }
        for (nth, step) in steps.into_iter().rev().enumerate() {
            // Fails if a codec needs a partner that does not exist.
            self.partners_of(links, registry, shard, chunk, &step)?;
            let base = (nth > 0).then(|| recipe.ops.len() - 1);
            recipe.ops.push(Op { shard, step, base, partners: vec![], gives_gradient: false });
        }
        Ok(recipe.ops.len() - 1)
    }

    /// Returns the partners that a stored form needs.
    fn partners_of(
        &self,
        links: &[impl AsRef<Link>],
        registry: &Registry,
        shard: usize,
        chunk: u64,
        step: &Step,
    ) -> Result<Vec<PartnerPlans>> {
        let (Some(codec), Some(plan)) = (&step.entry.codec, self.shards.get(shard)) else { return Ok(vec![]) };
        let mut found = Vec::new();
        let role = plan.role(links, step.link);
        let needs = registry.needs(codec, role);
        if let Some(known) = registry.get(&codec.id).filter(|known| !known.is_standalone()) {
            let names: Vec<&str> = step.entry.pages.iter().map(|page| page.column.as_str()).collect();
            known.check_role(role, &names).map_err(|e| e.tensor(&plan.name).chunk(chunk))?;
        }
        for need in needs {
            let at = |link: usize| {
                let known = self.partners.get(&(shard, link, need.role)).copied().flatten();
                known.ok_or_else(|| {
                    let message =
                        format!("codec `{}` needs the tensor of role `{}` of its parameter, which is not there", codec.id, need.role);
                    self.fail(shard, chunk, message)
                })
            };
            // Only a delta has a parent.
            let base = if need.base && step.entry.kind == ChunkKind::Delta { Some(at(step.link + 1)?) } else { None };
            let now = at(step.link)?;
            let dtype = |number: usize| self.shards.get(number).map(|plan| plan.dtype);
            if base.is_some_and(|base| dtype(base) != dtype(now)) {
                return Err(self.fail(shard, chunk, format!("its partner of role `{}` had another dtype in the parent", need.role)));
            }
            if need.gradient && self.stored(links, now, chunk, step.link)?.0.link != step.link {
                let message = format!("its partner of role `{}` holds no gradients of this step", need.role);
                return Err(self.fail(shard, chunk, message).clause("codecs 5.4"));
            }
            found.push(PartnerPlans { role: need.role, now, base, gradient: need.gradient });
        }
        Ok(found)
    }

    fn stored(&self, links: &[impl AsRef<Link>], shard: usize, chunk: u64, from: usize) -> Result<(Step, u32)> {
        let (Some(plan), Some(rows)) = (self.shards.get(shard), self.rows.get(shard)) else {
            return Err(Error::invalid("a shard that was not planned"));
        };
        plan.stored(links, rows, chunk, from)
    }

    fn fail(&self, shard: usize, chunk: u64, message: String) -> Error {
        let name = self.shards.get(shard).map_or("", |plan| plan.name.as_str());
        Error::corrupt(message).tensor(name).chunk(chunk).clause("codecs 5.2")
    }
}

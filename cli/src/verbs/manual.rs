//! `tensorcask completions` and `tensorcask man`: files for the shell and for `man`, made from the help texts.

use std::path::{Path, PathBuf};

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use serde::Serialize;
use tensorcask::{Error, Result};

use crate::output::Outcome;
use crate::text::Text;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example, for bash:
  tensorcask completions bash > ~/.local/share/bash-completion/completions/tensorcask
For zsh: a file `_tensorcask` in a folder of $fpath. For fish: ~/.config/fish/completions/tensorcask.fish.")]
pub(crate) struct CompletionsArgs {
    /// Shell that the script is for
    shell: Shell,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  tensorcask man ~/.local/share/man/man1
  man tensorcask-save")]
pub(crate) struct ManArgs {
    /// Folder to write to; it is created if it does not exist
    folder: PathBuf,
}

#[derive(Debug, Serialize)]
struct Script {
    shell: String,
    script: String,
}

#[derive(Debug, Serialize)]
struct Pages {
    files: Vec<String>,
}

/// Prints the script that completes commands in a shell.
pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> Result<Outcome> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    let script = String::from_utf8(script).map_err(|e| Error::invalid(format!("cannot make the completions: {e}")))?;
    let text = Text::verbatim(script.clone());
    Outcome::new(&Script { shell: args.shell.to_string(), script }, text)
}

/// Writes one page for the command and one for each verb.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<Outcome> {
    let fail = |e| Error::io(args.folder.display().to_string(), e);
    std::fs::create_dir_all(&args.folder).map_err(fail)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut files = Vec::new();
    write_pages(command, &args.folder, &mut files).map_err(fail)?;
    let mut text = Text::default();
    text.line(format!("{} pages in {}", files.len(), args.folder.display()));
    Outcome::new(&Pages { files }, text)
}

/// Writes the page of a command, then those of its subcommands.
fn write_pages(command: Command, folder: &Path, files: &mut Vec<String>) -> std::io::Result<()> {
    let subcommands: Vec<Command> = command.get_subcommands().filter(|found| !found.is_hide_set()).cloned().collect();
    files.push(Man::new(command).generate_to(folder)?.display().to_string());
    subcommands.into_iter().try_for_each(|command| write_pages(command, folder, files))
}

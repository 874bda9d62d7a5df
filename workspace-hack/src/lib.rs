//! Empty: this crate is here for the features that it names, so that every build of the workspace compiles a dependency once.

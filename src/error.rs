//! The error type of the crate: a kind for programs, a place and a sentence for people.

use std::fmt;

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of an [`Error`], which tells a program how to react.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Stored bytes differ from the bytes that were written: damaged, swapped, truncated or forged.
    Corrupt,
    /// The requested store, snapshot, step, tensor or blob does not exist.
    NotFound,
    /// Another writer changed the store first. Reading the store again and retrying may succeed.
    Conflict,
    /// Another job took over this store. This writer must stop.
    Fenced,
    /// The outcome of a commit cannot be known. Reopen the store before the next save.
    OutcomeUnknown,
    /// The caller passed data that cannot be stored or read.
    InvalidArgument,
    /// A stored state cannot fill the caller's tensors: names, shapes or types differ. The step exists.
    Template,
    /// The data is well-formed, but this version or build cannot handle it.
    Unsupported,
    /// A declared size or count is beyond [`Limits`](crate::Limits).
    LimitExceeded,
    /// The storage does not give the guarantees that commits need (put-if-absent, links, fsync).
    UnsafeStore,
    /// The storage failed: no space, no permission, no network.
    Storage,
}

impl ErrorKind {
    /// Whether an object is there and its bytes cannot be used.
    pub(crate) fn is_damaged_object(self) -> bool {
        matches!(self, Self::Corrupt | Self::LimitExceeded)
    }

    /// Whether this reader cannot read stored objects, as opposed to a storage that fails now: they are damaged or gone, or beyond
    /// its limits, or of a newer version. Others may be able to read them. So this says that a list must leave a step out, never
    /// that a step may be replaced or deleted: see [`Error::is_damage`].
    ///
    /// ```
    /// use tensorcask::Error;
    /// let newer = Error::unsupported("needs feature `x` that this version does not understand");
    /// assert!(newer.kind().is_unreadable() && !newer.is_damage());
    /// ```
    pub fn is_unreadable(self) -> bool {
        matches!(self, Self::Corrupt | Self::NotFound | Self::LimitExceeded | Self::Unsupported)
    }

    /// Returns the name used in JSON output and by conformance adapters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Corrupt => "corrupt",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Fenced => "fenced",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::InvalidArgument => "invalid_argument",
            Self::Template => "template",
            Self::Unsupported => "unsupported",
            Self::LimitExceeded => "limit_exceeded",
            Self::UnsafeStore => "unsafe_store",
            Self::Storage => "storage",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An error: what happened, in which object, and which clause of the spec is violated.
///
/// ```
/// use tensorcask::{Error, ErrorKind};
/// let error = Error::corrupt("page checksum mismatch")
///     .object("casks/7f.cask").tensor("model.wte").chunk(3).offset(4096).clause("container 5.2");
/// assert_eq!(error.kind(), ErrorKind::Corrupt);
/// assert_eq!(error.to_string(),
///     "corrupt: casks/7f.cask: tensor `model.wte`, chunk 3, offset 4096: page checksum mismatch [spec: container 5.2]");
/// ```
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    message: String,
    object: Option<String>,
    tensor: Option<String>,
    chunk: Option<u64>,
    offset: Option<u64>,
    clause: Option<&'static str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $kind:ident),* $(,)?) => {
        $($(#[$doc])* pub fn $name(message: impl Into<String>) -> Self { Self::new(ErrorKind::$kind, message) })*
    };
}

impl Error {
    /// Creates an error of `kind` with `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            object: None,
            tensor: None,
            chunk: None,
            offset: None,
            clause: None,
            source: None,
        }))
    }

    constructors! {
        /// Creates an [`ErrorKind::Corrupt`] error.
        corrupt => Corrupt,
        /// Creates an [`ErrorKind::NotFound`] error.
        not_found => NotFound,
        /// Creates an [`ErrorKind::InvalidArgument`] error.
        invalid => InvalidArgument,
        /// Creates an [`ErrorKind::Template`] error.
        template => Template,
        /// Creates an [`ErrorKind::Unsupported`] error.
        unsupported => Unsupported,
        /// Creates an [`ErrorKind::LimitExceeded`] error.
        limit => LimitExceeded,
    }

    /// Wraps an error of the object store. `object` is the path of the request.
    pub(crate) fn storage(object: impl Into<String>, source: object_store::Error) -> Self {
        let source = match source {
            // An error of this crate that passed through an object store.
            object_store::Error::Generic { store, source } => match source.downcast::<Self>() {
                Ok(own) => return own.object(object),
                Err(source) => object_store::Error::Generic { store, source },
            },
            other => other,
        };
        let kind = match &source {
            object_store::Error::NotFound { .. } => ErrorKind::NotFound,
            object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. } => ErrorKind::Conflict,
            _ => ErrorKind::Storage,
        };
        let message = match kind {
            ErrorKind::NotFound => "no such object".to_owned(),
            ErrorKind::Conflict => "the object exists already".to_owned(),
            _ => root_cause(&source),
        };
        Self::new(kind, message).object(object).source(source)
    }

    /// Wraps an I/O error on a local file.
    pub fn io(object: impl Into<String>, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Storage,
        };
        Self::new(kind, source.to_string()).object(object).source(source)
    }

    /// Adds the object: a path below the store's root, or a local file. The innermost object wins.
    pub fn object(mut self, object: impl Into<String>) -> Self {
        self.0.object.get_or_insert_with(|| object.into());
        self
    }

    /// Adds the tensor or blob.
    pub fn tensor(mut self, tensor: impl Into<String>) -> Self {
        self.0.tensor.get_or_insert_with(|| tensor.into());
        self
    }

    /// Adds the chunk number within the shard.
    pub fn chunk(mut self, chunk: u64) -> Self {
        self.0.chunk.get_or_insert(chunk);
        self
    }

    /// Adds the byte offset within the object.
    pub fn offset(mut self, offset: u64) -> Self {
        self.0.offset.get_or_insert(offset);
        self
    }

    /// Moves the byte offset, which counts from the beginning of a part of an object, to where the part begins.
    pub(crate) fn within(mut self, part_offset: u64) -> Self {
        self.0.offset = self.0.offset.map(|offset| offset.saturating_add(part_offset));
        self
    }

    /// Adds the violated clause of `spec/`.
    pub fn clause(mut self, clause: &'static str) -> Self {
        self.0.clause.get_or_insert(clause);
        self
    }

    /// Adds the cause.
    pub fn source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// Returns the kind, which tells a program how to react.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether stored objects are damaged or gone. What a newer version wrote, or a writer with other [limits](crate::Limits), is
    /// neither, although this reader [cannot read](ErrorKind::is_unreadable) it.
    pub fn is_damage(&self) -> bool {
        matches!(self.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) || self.is_given_up()
    }

    /// Whether a job has forgotten a snapshot and deleted its objects since it was opened. The store has a newer one.
    pub fn is_given_up(&self) -> bool {
        self.clause_name() == Some(GIVEN_UP)
    }

    /// Whether this reader cannot read stored objects: see [`ErrorKind::is_unreadable`]. Also of a snapshot that was
    /// [given up](Self::is_given_up) meanwhile.
    pub fn is_unreadable(&self) -> bool {
        self.kind().is_unreadable() || self.is_given_up()
    }

    /// Whether a commit was refused because garbage collection might delete its objects before it is done: they were written too
    /// long ago. Only a commit with other objects can succeed.
    pub fn is_too_late(&self) -> bool {
        self.clause_name() == Some(TOO_LATE)
    }

    /// Whether the storage gave no answer: no connection, a timeout, a server error, a disk that fails. A storage that refuses
    /// (no permission, no such bucket) has answered.
    ///
    /// ```
    /// use std::io;
    /// use tensorcask::Error;
    /// assert!(Error::io("log", io::ErrorKind::TimedOut.into()).is_unanswered());
    /// assert!(!Error::io("log", io::ErrorKind::PermissionDenied.into()).is_unanswered());
    /// ```
    pub fn is_unanswered(&self) -> bool {
        if self.kind() != ErrorKind::Storage {
            return false;
        }
        let first = std::error::Error::source(self);
        std::iter::successors(first, |cause| cause.source()).find_map(tells_of_answer).is_some_and(|answered| !answered)
    }

    /// Returns the sentence without the place.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the object at fault, if any.
    pub fn object_name(&self) -> Option<&str> {
        self.0.object.as_deref()
    }

    /// Returns the tensor at fault, if any.
    pub fn tensor_name(&self) -> Option<&str> {
        self.0.tensor.as_deref()
    }

    /// Returns the chunk at fault, if any.
    pub fn chunk_number(&self) -> Option<u64> {
        self.0.chunk
    }

    /// Returns the byte offset at fault, if any.
    pub fn byte_offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// Returns the violated clause of `spec/`, if any.
    pub fn clause_name(&self) -> Option<&'static str> {
        self.0.clause
    }
}

/// Clause of `spec/` that refuses a commit with objects that are too old.
pub(crate) const TOO_LATE: &str = "log 7.5";

/// Clause of the error for a snapshot that was given up while it was read.
pub(crate) const GIVEN_UP: &str = "log 7.6";

impl From<tensorcask_kernels::memory::OutOfMemory> for Error {
    fn from(e: tensorcask_kernels::memory::OutOfMemory) -> Self {
        Self::limit(e.to_string()).source(e)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        write!(f, "{}: ", inner.kind)?;
        if let Some(object) = &inner.object {
            write!(f, "{}: ", Printable(object))?;
        }
        let mut place = Vec::new();
        if let Some(tensor) = &inner.tensor {
            place.push(format!("tensor `{}`", tensor.escape_debug()));
        }
        if let Some(chunk) = inner.chunk {
            place.push(format!("chunk {chunk}"));
        }
        if let Some(offset) = inner.offset {
            place.push(format!("offset {offset}"));
        }
        if !place.is_empty() {
            write!(f, "{}: ", place.join(", "))?;
        }
        write!(f, "{}", Printable(&inner.message))?;
        if let Some(clause) = inner.clause {
            write!(f, " [spec: {clause}]")?;
        }
        Ok(())
    }
}

/// Text from a store or a server, printed without control characters that a terminal would obey.
struct Printable<'a>(&'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| if c.is_control() { write!(f, "{}", c.escape_default()) } else { fmt::Write::write_char(f, c) })
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|e| e as _)
    }
}

/// Adds a place to the error of a result.
pub(crate) trait ResultExt<T> {
    fn in_object(self, object: impl Into<String>) -> Result<T>;
}

impl<T> ResultExt<T> for Result<T> {
    fn in_object(self, object: impl Into<String>) -> Result<T> {
        self.map_err(|e| e.object(object))
    }
}

/// A complete sentence for the user. In a chain of causes, it replaces the whole chain.
#[derive(Debug)]
pub(crate) struct Advice {
    pub sentence: String,
    /// Whether the storage has answered.
    pub is_answer: bool,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Advice {}

/// Whether the storage has answered, if one cause of an error tells.
fn tells_of_answer(cause: &(dyn std::error::Error + 'static)) -> Option<bool> {
    use std::io::ErrorKind::{NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    if let Some(advice) = cause.downcast_ref::<Advice>() {
        return Some(advice.is_answer);
    }
    if let Some(error) = cause.downcast_ref::<object_store::Error>() {
        // The cause of any other error tells more.
        let is_refusal = matches!(
            error,
            object_store::Error::PermissionDenied { .. }
                | object_store::Error::Unauthenticated { .. }
                | object_store::Error::NotSupported { .. }
                | object_store::Error::NotImplemented { .. }
                | object_store::Error::InvalidPath { .. }
                | object_store::Error::UnknownConfigurationKey { .. }
        );
        return is_refusal.then_some(true);
    }
    #[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
    if let Some(error) = cause.downcast_ref::<object_store::client::HttpError>() {
        use object_store::client::HttpErrorKind::{Decode, Unknown};
        // The cause of another kind may be advice.
        return (!matches!(error.kind(), Unknown | Decode)).then_some(false);
    }
    if let Some(error) = cause.downcast_ref::<std::io::Error>() {
        return Some(matches!(error.kind(), NotFound | PermissionDenied | ReadOnlyFilesystem | StorageFull | QuotaExceeded));
    }
    status_in(&cause.to_string()).map(|status| status < 500 && status != 429 && status != 408)
}

/// Whether a storage reported that it did not perform a request: it refused, or has no room.
pub(crate) fn is_refusal(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    let is_named = matches!(
        error,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } | E::NotImplemented { .. } | E::NotSupported { .. } | E::InvalidPath { .. }
    );
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |cause| cause.source());
    // A server answers 408, 409, 412, 425 and 429 to a request that may succeed, or has succeeded, in another attempt.
    let refuses = |status| matches!(status, 400..=499 | 501 | 507) && ![408, 409, 412, 425, 429].contains(&status);
    is_named || causes.filter_map(|cause| status_in(&cause.to_string())).next().is_some_and(refuses)
}

/// Whether a network file system gave no answer. It may still perform the request.
pub(crate) fn is_out_of_reach(error: &object_store::Error) -> bool {
    use std::io::ErrorKind::{
        HostUnreachable, Interrupted, NetworkDown, NetworkUnreachable, NotConnected, StaleNetworkFileHandle, TimedOut,
    };
    const EIO: i32 = 5;
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |cause| cause.source());
    causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>()).any(|error| {
        let is_lost = matches!(error.kind(), HostUnreachable | NetworkDown | NetworkUnreachable | NotConnected | StaleNetworkFileHandle);
        is_lost || matches!(error.kind(), TimedOut | Interrupted) || error.raw_os_error() == Some(EIO)
    })
}

/// The status of a server's answer. `object_store` tells it in its messages only.
fn status_in(message: &str) -> Option<u16> {
    let (_, rest) = message.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// Returns the innermost message that a user can act on. Object stores nest their messages several levels deep.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    if let Some(Advice { sentence, .. }) = causes.filter_map(|cause| cause.downcast_ref()).next() {
        return sentence.clone();
    }
    let mut message = error.to_string();
    let mut current = error.source();
    while let Some(inner) = current {
        let text = inner.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        current = inner.source();
    }
    message
}

//! Connections to peers: TCP, with TLS unless all agents are on one machine.

use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::tls::Tls;

/// Opens connections to peers.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    /// `None` to connect without TLS, to this machine only.
    pub tls: Option<Arc<Tls>>,
    /// Time limit of a connection and its handshake.
    pub timeout: Duration,
}

impl Connector {
    async fn connect(self, uri: Uri) -> Result<TokioIo<Stream>> {
        let host = uri.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = uri.port_u16().unwrap_or(0);
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            if !stream.peer_addr()?.ip().is_loopback() {
                let message = "peers have no certificates, and this one is on another machine; make them with `tensorcask agent init-tls`";
                return Err(Error::new(ErrorKind::PermissionDenied, message));
            }
            return Ok(TokioIo::new(Stream(Box::new(stream))));
        };
        let connected = TlsConnector::from(tls.client()).connect(tls.name(), stream).await?;
        Ok(TokioIo::new(Stream(Box::new(connected))))
    }
}

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let timeout = self.timeout;
        let connector = self.clone();
        Box::pin(async move {
            let connected = tokio::time::timeout(timeout, connector.connect(uri)).await;
            connected.unwrap_or_else(|_| Err(Error::new(ErrorKind::TimedOut, format!("no connection within {timeout:?}"))))
        })
    }
}

/// A connection, with or without TLS.
pub(super) struct Stream(Box<dyn Bytestream>);

trait Bytestream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytestream for T {}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

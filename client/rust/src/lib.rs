#![doc = include_str!("../README.md")]

use std::env;
use std::time::Duration;

use tonic::transport::{Endpoint, Error};

// Their types are part of this crate's interface.
pub use {prost_types, tonic, tonic_types};

mod retry;
/// Messages and clients of the package `moorage.v1`, as its protos generate them.
#[rustfmt::skip]
pub mod v1;

pub use retry::{Retry, is_unavailable};

/// Server where MOORAGE_SERVER names none.
pub const DEFAULT_SERVER: &str = "127.0.0.1:50061";

/// HOST:PORT of the server: MOORAGE_SERVER, else [`DEFAULT_SERVER`].
pub fn server() -> String {
    env::var("MOORAGE_SERVER").ok().filter(|server| !server.is_empty()).unwrap_or_else(|| DEFAULT_SERVER.into())
}

/// An endpoint as moorage wants its connections, in plain text; `server` is HOST:PORT.
///
/// A channel holds one connection, to the first address of a name that answers. To spread calls over all replicas, give
/// the endpoints of their addresses to [`Channel::balance_list`](tonic::transport::Channel::balance_list). For TLS,
/// enable `tls-ring` of tonic, write `https://HOST:PORT`, and set a `ClientTlsConfig`.
///
/// # Errors
///
/// Where `server` is no address.
pub fn endpoint(server: &str) -> Result<Endpoint, Error> {
    let uri = if server.contains("://") { server.to_owned() } else { format!("http://{server}") };
    Ok(Endpoint::from_shared(uri)?
        .user_agent(concat!("moorage-rust/", env!("CARGO_PKG_VERSION")))?
        .connect_timeout(Duration::from_secs(5))
        // A waiting Admit is silent for minutes. The server permits a ping every 30 s.
        .http2_keep_alive_interval(Duration::from_secs(60))
        .keep_alive_timeout(Duration::from_secs(20)))
}

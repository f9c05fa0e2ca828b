//! Retries, which tonic leaves to its callers.

use std::time::Duration;

use tonic::{Code, Status, TimeoutExpired};
use tonic_types::StatusExt;

const PUSHBACK: &str = "grpc-retry-pushback-ms";

/// Repeats calls that could not be answered, as the retry policy of moorage's other clients does.
///
/// Only what [`is_unavailable`] is repeated. The server's word on when to come back (`grpc-retry-pushback-ms`, else
/// `RetryInfo`) goes before the backoff; a negative or malformed pushback ends it. Give each mutation a `request_id`
/// that is the same in every try: whichever try is heard first, the answer is one.
///
/// ```no_run
/// # use moorage::{Retry, v1::{ReleaseRequest, scheduler_service_client::SchedulerServiceClient}};
/// # async fn release(client: SchedulerServiceClient<moorage::tonic::transport::Channel>, request: ReleaseRequest)
/// # -> Result<(), moorage::tonic::Status> {
/// let rpc = async |mut client: SchedulerServiceClient<_>, request| client.release(request).await;
/// let answer = Retry::default().call(client, request, rpc).await?;
/// # Ok(())
/// # }
/// ```
///
/// The time of all tries together is bounded only by the caller, with `tokio::time::timeout` for example.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// Tries in all, the first included.
    pub attempts: u32,
    /// Pause after the first try, where the server asks for none; it doubles with each try, give or take a fifth.
    pub initial_backoff: Duration,
    /// Longest such pause.
    pub max_backoff: Duration,
}

impl Default for Retry {
    /// Five tries in about three seconds.
    fn default() -> Self {
        Self { attempts: 5, initial_backoff: Duration::from_millis(200), max_backoff: Duration::from_secs(2) }
    }
}

impl Retry {
    /// The first answer of `rpc`, which is given a clone of the client and one of the request for each try.
    ///
    /// # Errors
    ///
    /// The status of the last try.
    pub async fn call<C, R, T, F>(&self, client: C, request: R, mut rpc: impl FnMut(C, R) -> F) -> Result<T, Status>
    where
        C: Clone,
        R: Clone,
        F: Future<Output = Result<T, Status>>,
    {
        let mut backoff = self.initial_backoff;
        for _ in 1..self.attempts {
            let status = match rpc(client.clone(), request.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(status) => status,
            };
            let Some(pause) = pause(&status, backoff.min(self.max_backoff)) else { return Err(status) };
            tokio::time::sleep(pause).await;
            backoff *= 2;
        }
        rpc(client, request).await
    }
}

/// Whether the call was not answered, and may be tried again: the control plane, its store or the way there is down.
///
/// Besides UNAVAILABLE that is CANCELLED (a server that ends, or sheds a burst, drops what it has not begun to read), and
/// a connection that broke, for which tonic has several codes. A deadline of the caller's own that ran out is not.
pub fn is_unavailable(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    // What the server said has no source.
    let broken = source.is_some();
    while let Some(error) = source {
        if error.is::<TimeoutExpired>() {
            return false;
        }
        source = error.source();
    }
    broken || matches!(status.code(), Code::Unavailable | Code::Cancelled)
}

/// How long to wait before the next try; None where there should be none.
fn pause(status: &Status, backoff: Duration) -> Option<Duration> {
    if !is_unavailable(status) {
        return None;
    }
    if let Some(pushback) = status.metadata().get(PUSHBACK) {
        return pushback.to_str().ok()?.parse().ok().map(Duration::from_millis);
    }
    let asked = status.get_details_retry_info().and_then(|info| info.retry_delay);
    Some(asked.unwrap_or_else(|| backoff.mul_f64(0.8 + 0.4 * fastrand::f64())))
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::net::{SocketAddr, TcpListener};
    use std::thread;

    use tokio::time::Instant;
    use tonic::Request;
    use tonic::metadata::MetadataMap;
    use tonic_types::ErrorDetails;

    use super::*;
    use crate::endpoint;
    use crate::v1::AdmitRequest;
    use crate::v1::scheduler_service_client::SchedulerServiceClient;

    fn pushed_back(pushback: &'static str) -> Status {
        let mut trailers = MetadataMap::new();
        trailers.insert(PUSHBACK, pushback.parse().unwrap());
        let details = ErrorDetails::with_retry_info(Some(Duration::from_secs(60)));
        Status::with_error_details_and_metadata(Code::Unavailable, "store away", details, trailers)
    }

    /// Tries and seconds until `status` is given up, where every try fails with it.
    async fn give_up(status: Status) -> (u32, f64) {
        let (mut tries, begin) = (0, Instant::now());
        let rpc = |(), status| {
            tries += 1;
            ready(Err::<(), _>(status))
        };
        assert_eq!(Retry::default().call((), status.clone(), rpc).await.unwrap_err().code(), status.code());
        (tries, begin.elapsed().as_secs_f64())
    }

    #[tokio::test(start_paused = true)]
    async fn pushback_goes_before_retry_info() {
        let (tries, seconds) = give_up(pushed_back("300")).await;
        assert_eq!(tries, 5);
        assert!((1.2..1.3).contains(&seconds), "{seconds}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_negative_or_malformed_pushback_ends_it() {
        assert_eq!(give_up(pushed_back("-1")).await, (1, 0.0));
        assert_eq!(give_up(pushed_back("soon")).await, (1, 0.0));
    }

    #[tokio::test(start_paused = true)]
    async fn retry_info_goes_before_the_backoff() {
        let details = ErrorDetails::with_retry_info(Some(Duration::from_secs(10)));
        let (tries, seconds) = give_up(Status::with_error_details(Code::Unavailable, "store away", details)).await;
        assert_eq!(tries, 5);
        assert!((40.0..40.1).contains(&seconds), "{seconds}");
    }

    #[tokio::test(start_paused = true)]
    async fn backoff_doubles_with_jitter() {
        for status in [Status::unavailable("no connection"), Status::cancelled("shed")] {
            let (tries, seconds) = give_up(status).await;
            assert_eq!(tries, 5);
            // 0.2 + 0.4 + 0.8 + 1.6, give or take a fifth.
            assert!((2.4..3.7).contains(&seconds), "{seconds}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_answered_is_not_repeated() {
        assert_eq!(give_up(Status::invalid_argument("session_id")).await, (1, 0.0));
        assert_eq!(give_up(Status::aborted("stale token")).await, (1, 0.0));
        assert_eq!(give_up(Status::unknown("said by the server")).await, (1, 0.0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_ends_it() {
        let mut tries = 0;
        let rpc = |(), ()| {
            tries += 1;
            ready(if tries < 3 { Err(Status::unavailable("not yet")) } else { Ok(tries) })
        };
        assert_eq!(Retry::default().call((), (), rpc).await.unwrap(), 3);
    }

    /// How a call fails at `address` after at most half a second.
    async fn failure(address: SocketAddr) -> Status {
        let channel = endpoint(&address.to_string()).unwrap().connect_lazy();
        let mut request = Request::new(AdmitRequest::default());
        request.set_timeout(Duration::from_millis(500));
        SchedulerServiceClient::new(channel).admit(request).await.unwrap_err()
    }

    #[tokio::test]
    async fn a_refused_connection_is_unavailable() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let status = failure(address).await;
        assert!(is_unavailable(&status), "{status:?}");
    }

    #[tokio::test]
    async fn a_broken_connection_is_unavailable() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || listener.incoming().for_each(drop));
        let status = failure(address).await;
        assert!(is_unavailable(&status), "{status:?}");
    }

    #[tokio::test]
    async fn a_deadline_of_ones_own_is_not() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let status = failure(silent.local_addr().unwrap()).await;
        assert!(!is_unavailable(&status), "{status:?}");
    }
}

//! The router proper: sessions are admitted, placed turn by turn, renewed in the background, and released however they
//! end.

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use moorage::tonic::transport::Channel;
use moorage::tonic::{Code, Response, Status};
use moorage::tonic_types::StatusExt;
use moorage::v1::scheduler_service_client::SchedulerServiceClient;
use moorage::v1::{
    AdmitRequest, Decision, HeartbeatRequest, HeartbeatResponse, Hold, Lease, Outcome, Phase, PlaceRequest, Placement,
    ReleaseRequest, SessionProgress, Usage,
};
use moorage::{Retry, prost_types};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

/// How long a call that does not wait may take, with all its retries.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an Admit stays open for its turn. A router would say 30 s or more; here it is short to show a hold.
const MAX_WAIT: Duration = Duration::from_millis(300);

/// How long a caller is kept waiting before it is sent away.
const PATIENCE: Duration = Duration::from_secs(60);

/// Items that a heartbeat may carry.
const HEARTBEAT_ITEMS: usize = 1_000;

/// Time between heartbeats where the server asks for no other.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

const TURNS: u32 = 3;

/// What a caller of the router hears: a text, or what went wrong.
pub type Answer = Result<String, String>;

type Scheduler = SchedulerServiceClient<Channel>;

#[derive(Clone)]
pub struct Router {
    scheduler: Scheduler,
    pub pool: String,
    retry: Retry,
    sessions: Arc<Mutex<Sessions>>,
}

/// What the next heartbeats say.
#[derive(Default)]
struct Sessions {
    /// By id, with the token in force: each heartbeat renews their leases.
    living: HashMap<String, SessionProgress>,
    /// Finished turns that were not reported yet.
    finished: Vec<SessionProgress>,
}

impl Router {
    pub fn new(channel: Channel, pool: String) -> Self {
        Self { scheduler: Scheduler::new(channel), pool, retry: Retry::default(), sessions: Arc::default() }
    }

    /// Whether the session was admitted and is not over.
    pub fn has(&self, id: &str) -> bool {
        self.sessions().living.contains_key(id)
    }

    /// Serves one session, on a task of its own. Whoever drops the receiver gives the session up.
    pub async fn serve(self, id: String, mut caller: oneshot::Sender<Answer>) {
        let request = AdmitRequest {
            pool: self.pool.clone(),
            request_id: new_request_id(),
            session_id: id.clone(),
            workload_class: "agentic".into(),
            prompt_tokens: Some(256),
            expected_turns: Some(TURNS),
            max_context_tokens: Some(512),
            max_wait: MAX_WAIT.try_into().ok(),
            ..Default::default()
        };
        let admission = tokio::select! {
            admission = timeout(PATIENCE, self.admit(&request)) => {
                admission.unwrap_or_else(|_| Err(format!("held for {PATIENCE:?}")))
            }
            () = caller.closed() => Err("the caller is gone".into()),
        };
        let answer = match admission {
            Ok(()) => {
                let (outcome, answer) = self.converse(&id, &mut caller).await;
                self.release(&id, outcome).await;
                answer
            }
            Err(error) => {
                println!("{id}: not admitted, {error}");
                self.withdraw(&request).await;
                Err(error)
            }
        };
        // A caller that is gone does not mind.
        let _ = caller.send(answer);
    }

    /// Waits through holds until the session lives. A hold keeps its place in the queue if it comes back in time.
    pub async fn admit(&self, request: &AdmitRequest) -> Result<(), String> {
        let id = &request.session_id;
        loop {
            let rpc = async |mut scheduler: Scheduler, request| scheduler.admit(request).await;
            let answer = self.call(request.clone(), MAX_WAIT, rpc).await.map_err(|status| explain(&status))?;
            let hold = answer.hold.clone().unwrap_or_default();
            match answer.decision() {
                Decision::Place => {
                    println!("{id}: admitted to {}", home(answer.placement.as_ref()));
                    self.sessions().living.insert(id.clone(), progress(id, answer.lease.unwrap_or_default()));
                    return Ok(());
                }
                Decision::Hold => sit_out(id, &hold).await,
                _ => return Err(format!("rejected, {}: {}", hold.reason().as_str_name(), hold.detail)),
            }
        }
    }

    /// All turns of a living session. Only the engine's work is cut short when the caller goes: a Place whose answer is
    /// not seen may have changed the token.
    async fn converse(&self, id: &str, caller: &mut oneshot::Sender<Answer>) -> (Outcome, Answer) {
        let mut context = 256;
        for turn in 0..TURNS {
            let placement = match self.place(id, turn, context).await {
                Ok(placement) => placement,
                Err(error) => return (Outcome::Failed, Err(error)),
            };
            let output = tokio::select! {
                output = generate(id, turn, &placement) => output,
                () = caller.closed() => {
                    println!("{id}: the caller is gone");
                    return (Outcome::Aborted, Err("the caller is gone".into()));
                }
            };
            let tokens = match output {
                Ok(tokens) => tokens,
                Err(error) => return (Outcome::Failed, Err(error)),
            };
            // The engine's answer would say how much of the prompt it had cached; this one has all but the new.
            let cached = if turn == 0 { 0 } else { context - 16 };
            context += tokens;
            self.turn_ended(id, context, cached, tokens);
        }
        (Outcome::Completed, Ok(format!("{TURNS} turns, {context} tokens")))
    }

    /// Where the next turn goes: at once while its engine lives, else after a hold.
    async fn place(&self, id: &str, turn: u32, prompt_tokens: u64) -> Result<Placement, String> {
        loop {
            let lease_token = self.sessions().living.get(id).map(|session| session.lease_token.clone());
            let request = PlaceRequest {
                pool: self.pool.clone(),
                request_id: new_request_id(),
                session_id: id.into(),
                lease_token: lease_token.unwrap_or_default(),
                turn: Some(turn),
                prompt_tokens: Some(prompt_tokens),
                max_wait: MAX_WAIT.try_into().ok(),
                ..Default::default()
            };
            let rpc = async |mut scheduler: Scheduler, request| scheduler.place(request).await;
            let answer = self.call(request, MAX_WAIT, rpc).await.map_err(|status| explain(&status))?;
            if answer.decision() != Decision::Place {
                sit_out(id, &answer.hold.unwrap_or_default()).await;
                continue;
            }
            if answer.moved {
                println!("{id}: moved to {}", home(answer.placement.as_ref()));
            }
            if let Some(session) = self.sessions().living.get_mut(id) {
                session.lease_token = answer.lease.unwrap_or_default().token;
                session.phase = Phase::Running.into();
                session.turn = Some(turn);
                session.cached_tokens = None;
            }
            return Ok(answer.placement.unwrap_or_default());
        }
    }

    /// From here to its next turn the session waits for a tool. The next heartbeat tells how the turn went.
    fn turn_ended(&self, id: &str, context: u64, cached: u64, output: u64) {
        let mut sessions = self.sessions();
        let Some(session) = sessions.living.get_mut(id) else { return };
        session.phase = Phase::ToolWait.into();
        session.context_tokens = Some(context);
        session.cached_tokens = Some(cached);
        session.output_tokens = Some(session.output_tokens.unwrap_or(0) + output);
        let report = session.clone();
        sessions.finished.push(report);
    }

    async fn release(&self, id: &str, outcome: Outcome) {
        let Some(session) = self.sessions().living.remove(id) else { return };
        let usage = Usage {
            output_tokens: session.output_tokens,
            context_tokens: session.context_tokens,
            ..Default::default()
        };
        let request = ReleaseRequest {
            pool: self.pool.clone(),
            request_id: new_request_id(),
            session_id: id.into(),
            lease_token: session.lease_token,
            outcome: outcome.into(),
            usage: Some(usage),
        };
        match self
            .call(request, Duration::ZERO, async |mut scheduler: Scheduler, request| scheduler.release(request).await)
            .await
        {
            Ok(answer) => {
                let cost = answer.residency.unwrap_or_default();
                println!("{id}: released as {}, {:.1} block-seconds", outcome.as_str_name(), cost.block_seconds);
            }
            Err(status) => println!("{id}: not released, ends with its lease, {}", explain(&status)),
        }
    }

    /// Takes back a place in the queue, or an admission whose answer was not seen.
    async fn withdraw(&self, admit: &AdmitRequest) {
        let id = &admit.session_id;
        let request = ReleaseRequest {
            pool: self.pool.clone(),
            request_id: new_request_id(),
            session_id: id.clone(),
            outcome: Outcome::Aborted.into(),
            ..Default::default()
        };
        match self
            .call(request, Duration::ZERO, async |mut scheduler: Scheduler, request| scheduler.release(request).await)
            .await
        {
            Ok(answer) => println!("{id}: withdrawn ({})", if answer.released { "was held" } else { "left no trace" }),
            // A session that lives is not released without its token: the same Admit tells it again.
            Err(status) if status.code() == Code::InvalidArgument => {
                if let Ok(Ok(())) = timeout(CALL_TIMEOUT, self.admit(admit)).await {
                    self.release(id, Outcome::Aborted).await;
                }
            }
            Err(status) => println!("{id}: not withdrawn, expires, {}", explain(&status)),
        }
    }

    /// Renews all leases and reports turns, for ever. What fails is said again by the next heartbeat.
    pub async fn renew(self) {
        loop {
            let items = {
                let mut sessions = self.sessions();
                let mut items = mem::take(&mut sessions.finished);
                items.extend(sessions.living.values().cloned());
                items
            };
            let mut pause = HEARTBEAT_INTERVAL;
            for sessions in items.chunks(HEARTBEAT_ITEMS) {
                let request =
                    HeartbeatRequest { pool: self.pool.clone(), sessions: sessions.to_vec(), ..Default::default() };
                match self.heartbeat(request).await {
                    Ok(answer) => pause = span(answer.next_interval).unwrap_or(pause),
                    Err(status) => println!("heartbeat: {}", explain(&status)),
                }
            }
            sleep(pause).await;
        }
    }

    pub async fn heartbeat(&self, request: HeartbeatRequest) -> Result<HeartbeatResponse, Status> {
        let answer = self
            .call(request, Duration::ZERO, async |mut scheduler: Scheduler, request| scheduler.heartbeat(request).await)
            .await?;
        for ack in answer.sessions.iter().filter(|ack| !ack.known) {
            // Its next Place says the same. A turn may well be reported after its session was released.
            if self.has(&ack.session_id) {
                println!("{}: lease not renewed, {}", ack.session_id, ack.reason);
            }
        }
        if let Some(ack) = answer.instances.iter().find(|ack| !ack.accepted) {
            println!("{}: snapshot not taken, {}", ack.instance_id, ack.reason);
        }
        Ok(answer)
    }

    /// One call with its retries; `wait` is how long the server may take on purpose.
    async fn call<R: Clone, T, F>(
        &self,
        request: R,
        wait: Duration,
        rpc: impl FnMut(Scheduler, R) -> F,
    ) -> Result<T, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match timeout(wait + CALL_TIMEOUT, self.retry.call(self.scheduler.clone(), request, rpc)).await {
            Ok(answer) => answer.map(Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!("no answer within {:?}", wait + CALL_TIMEOUT))),
        }
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().expect("nobody panics with the lock")
    }
}

fn new_request_id() -> String {
    Uuid::new_v4().to_string()
}

fn progress(id: &str, lease: Lease) -> SessionProgress {
    SessionProgress {
        session_id: id.into(),
        lease_token: lease.token,
        phase: Phase::ToolWait.into(),
        ..Default::default()
    }
}

fn home(placement: Option<&Placement>) -> String {
    placement.map_or_else(String::new, |placement| format!("{} ({})", placement.instance_id, placement.endpoint))
}

fn span(duration: Option<prost_types::Duration>) -> Option<Duration> {
    duration?.try_into().ok()
}

/// Waits as the hold asks: never less, and a little more, so that those held together do not all return together.
async fn sit_out(id: &str, hold: &Hold) {
    let pause = span(hold.retry_after).unwrap_or(Duration::from_secs(1));
    println!(
        "{id}: held, {}, number {} in its class, asks again in {pause:.1?}; {}",
        hold.reason().as_str_name(),
        hold.position,
        hold.detail
    );
    sleep(pause.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
}

/// A failure and all that the server says about it.
pub fn explain(status: &Status) -> String {
    let details = status.get_error_details();
    let mut text = format!("{:?}: {}", status.code(), status.message());
    if let Some(info) = details.error_info() {
        text += &format!(" [{} of {}]", info.reason, info.domain);
    }
    for violation in details.bad_request().into_iter().flat_map(|bad| &bad.field_violations) {
        text += &format!("; {}: {}", violation.field, violation.description);
    }
    if let Some(delay) = details.retry_info().and_then(|info| info.retry_delay) {
        text += &format!("; retry after {delay:?}");
    }
    text
}

/// Stands for the engine's work on one turn: tokens generated.
async fn generate(id: &str, turn: u32, placement: &Placement) -> Result<u64, String> {
    sleep(Duration::from_millis(300)).await;
    if id == "broken" && turn == 1 {
        return Err(format!("{} answered 500", placement.endpoint));
    }
    Ok(16)
}

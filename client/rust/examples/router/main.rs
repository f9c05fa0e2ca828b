//! A small router at work: `cargo run --example router` plays five callers against MOORAGE_SERVER and says what it does.
//!
//! It does so in a pool of its own with one small engine, for which it speaks itself; with MOORAGE_POOL it uses the
//! engines of that pool. What a router of yours would do is in `router.rs`.

mod router;

use std::env;
use std::error::Error;
use std::time::Duration;

use moorage::tonic::Status;
use moorage::v1::{AdmitRequest, HeartbeatRequest, InstanceSnapshot, InstanceState};
use moorage::{endpoint, server};
use router::{Answer, HEARTBEAT_INTERVAL, Router, explain};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::sleep;
use uuid::Uuid;

/// Says that an engine is there with room for two of these sessions, as `moorage collect` does for real ones.
async fn speak_for_engine(router: &Router, sequence: u64, state: InstanceState) -> Result<(), Status> {
    let snapshot = InstanceSnapshot {
        instance_id: "engine-0".into(),
        endpoint: "http://127.0.0.1:8000".into(),
        incarnation: "1".into(),
        sequence,
        state: state.into(),
        block_size: Some(16),
        total_blocks: Some(64),
        ..Default::default()
    };
    let pool = router.pool.clone();
    router.heartbeat(HeartbeatRequest { pool, instances: vec![snapshot], ..Default::default() }).await?;
    Ok(())
}

async fn keep_speaking(router: Router) {
    for sequence in 2.. {
        sleep(HEARTBEAT_INTERVAL).await;
        if let Err(status) = speak_for_engine(&router, sequence, InstanceState::Serving).await {
            println!("engine-0: {}", explain(&status));
        }
    }
}

/// Waits for the answer, or hangs up: on a session that is at its engine, or on one that is in the queue.
async fn call(router: Router, name: &str, mut answer: oneshot::Receiver<Answer>) {
    match name {
        "hung-up" => {
            while !router.has(name) {
                sleep(Duration::from_millis(20)).await;
            }
        }
        "given-up" => sleep(Duration::from_millis(100)).await,
        _ => match (&mut answer).await {
            Ok(Ok(text)) => println!("{name}: answered, {text}"),
            Ok(Err(error)) => println!("{name}: failed, {error}"),
            Err(_) => println!("{name}: never answered"),
        },
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = env::var("MOORAGE_POOL");
    let own_engine = pool.is_err();
    let pool = pool.unwrap_or_else(|_| format!("rust-router-{}", Uuid::new_v4().simple()));
    println!("server {}, pool {pool}", server());
    let router = Router::new(endpoint(&server())?.connect_lazy(), pool);

    let mut background = JoinSet::new();
    if own_engine {
        speak_for_engine(&router, 1, InstanceState::Serving).await.map_err(|status| explain(&status))?;
        background.spawn(keep_speaking(router.clone()));
    }
    background.spawn(router.clone().renew());

    let mut sessions = JoinSet::new();
    for name in ["hung-up", "broken", "good-1", "good-2", "given-up"] {
        let (caller, answer) = oneshot::channel();
        sessions.spawn(router.clone().serve(name.into(), caller));
        sessions.spawn(call(router.clone(), name, answer));
    }
    sessions.join_all().await;

    // What is refused says which field the server minds.
    let nameless = AdmitRequest { pool: router.pool.clone(), ..Default::default() };
    if let Err(error) = router.admit(&nameless).await {
        println!("nameless: {error}");
    }

    background.shutdown().await;
    if own_engine {
        speak_for_engine(&router, u64::MAX >> 1, InstanceState::Stopped).await.map_err(|status| explain(&status))?;
    }
    Ok(())
}

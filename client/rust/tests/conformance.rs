//! Plays `proto/conformance/cases.json` against the server that MOORAGE_SERVER names.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use moorage::endpoint;
use moorage::tonic::transport::Channel;
use moorage::tonic::{Code, Request, Status};
use moorage::tonic_types::StatusExt;
use moorage::v1::inspector_service_client::InspectorServiceClient;
use moorage::v1::operator_service_client::OperatorServiceClient;
use moorage::v1::scheduler_service_client::SchedulerServiceClient;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

/// A call's answer in protobuf JSON, or its failure.
type Outcome = Result<Value, Status>;

/// What is wrong.
type Complaint = String;

fn protos() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto")
}

#[tokio::test]
async fn every_case_holds() {
    let path = env::var("MOORAGE_CONFORMANCE").map_or_else(|_| protos().join("conformance/cases.json"), PathBuf::from);
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert!(!cases.is_empty());
    let sources = ["inspector", "operator", "scheduler"].map(|name| format!("moorage/v1/{name}.proto"));
    let descriptors = DescriptorPool::from_file_descriptor_set(protox::compile(sources, [protos()]).unwrap()).unwrap();
    let mut complaints = Vec::new();
    for case in &cases {
        let name = text(&case["name"]);
        let variable = case.get("server").map_or("MOORAGE_SERVER", text);
        let Ok(server) = env::var(variable) else {
            assert_ne!(variable, "MOORAGE_SERVER", "MOORAGE_SERVER names the server to test against");
            println!("left out: {name} ({variable} is not set)");
            continue;
        };
        let channel = endpoint(&server).unwrap().connect_lazy();
        let mut player = Player { channel, descriptors: &descriptors, saved: HashMap::new() };
        match player.play(case).await {
            Ok(()) => println!("ok: {name}"),
            Err(complaint) => complaints.push(format!("{name}: {complaint}")),
        }
    }
    assert!(complaints.is_empty(), "{} of {} cases:\n{}", complaints.len(), cases.len(), complaints.join("\n"));
}

struct Player<'a> {
    channel: Channel,
    descriptors: &'a DescriptorPool,
    /// What stands for `${name}`.
    saved: HashMap<String, String>,
}

impl Player<'_> {
    async fn play(&mut self, case: &Value) -> Result<(), Complaint> {
        self.saved.insert("pool".into(), format!("conformance-{}", Uuid::new_v4().simple()));
        for (number, step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let method = text(&step["call"]);
            let until = Instant::now() + Duration::from_secs_f64(step["within"].as_f64().unwrap_or(0.0));
            let answer = loop {
                let request = self.filled(&step["request"]);
                let outcome = self.call(method, &request).await;
                match verdict(&self.filled(&step["expect"]), &outcome) {
                    Ok(()) => break outcome.unwrap_or_default(),
                    Err(_) if Instant::now() < until => sleep(Duration::from_millis(100)).await,
                    Err(complaint) => return Err(format!("step {number}, {method}: {complaint}; got {outcome:?}")),
                }
            };
            for (name, path) in step["save"].as_object().into_iter().flatten() {
                let value = at(&answer, text(path)).ok_or_else(|| format!("step {number}: no {path} to save"))?;
                self.saved.insert(name.clone(), value.as_str().map_or_else(|| value.to_string(), Into::into));
            }
        }
        Ok(())
    }

    /// A copy of `value` in which `${...}` are replaced.
    fn filled(&mut self, value: &Value) -> Value {
        match value {
            Value::String(template) => Value::String(self.filled_text(template)),
            Value::Array(items) => items.iter().map(|item| self.filled(item)).collect(),
            Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), self.filled(field))).collect(),
            other => other.clone(),
        }
    }

    fn filled_text(&mut self, template: &str) -> String {
        let mut parts = template.split("${");
        let mut filled = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (name, rest) = part.split_once('}').expect("${ is closed");
            let fresh = || Uuid::new_v4().to_string();
            match name {
                "uuid" => filled += &fresh(),
                _ if name.starts_with("uuid_") => filled += self.saved.entry(name.into()).or_insert_with(fresh),
                _ => filled += self.saved.get(name).unwrap_or_else(|| panic!("nothing is saved as {name}")),
            }
            filled += rest;
        }
        filled
    }

    /// One call by the generated client, its messages from and to JSON.
    async fn call(&self, method: &str, request: &Value) -> Outcome {
        let (service, name) = method.split_once('/').unwrap();
        let service = self.descriptors.get_service_by_name(&format!("moorage.v1.{service}")).unwrap();
        let descriptor = service.methods().find(|descriptor| descriptor.name() == name).unwrap();
        let message = DynamicMessage::deserialize(descriptor.input(), request).unwrap();
        macro_rules! rpc {
            ($client:ident, $rpc:ident) => {{
                let mut request = Request::new(message.transcode_to().unwrap());
                request.set_timeout(Duration::from_secs(30));
                let answer = $client::new(self.channel.clone()).$rpc(request).await?;
                Ok(to_json(descriptor.output(), answer.get_ref()))
            }};
        }
        match method {
            "SchedulerService/Admit" => rpc!(SchedulerServiceClient, admit),
            "SchedulerService/Place" => rpc!(SchedulerServiceClient, place),
            "SchedulerService/Release" => rpc!(SchedulerServiceClient, release),
            "SchedulerService/Heartbeat" => rpc!(SchedulerServiceClient, heartbeat),
            "InspectorService/GetPool" => rpc!(InspectorServiceClient, get_pool),
            "InspectorService/ListInstances" => rpc!(InspectorServiceClient, list_instances),
            "InspectorService/ListSessions" => rpc!(InspectorServiceClient, list_sessions),
            "InspectorService/GetSession" => rpc!(InspectorServiceClient, get_session),
            "InspectorService/ListClasses" => rpc!(InspectorServiceClient, list_classes),
            "OperatorService/ConfigurePool" => rpc!(OperatorServiceClient, configure_pool),
            "OperatorService/CordonInstance" => rpc!(OperatorServiceClient, cordon_instance),
            "OperatorService/UncordonInstance" => rpc!(OperatorServiceClient, uncordon_instance),
            "OperatorService/DrainInstance" => rpc!(OperatorServiceClient, drain_instance),
            "OperatorService/BeginWeightUpdate" => rpc!(OperatorServiceClient, begin_weight_update),
            "OperatorService/EndWeightUpdate" => rpc!(OperatorServiceClient, end_weight_update),
            "OperatorService/EvictSession" => rpc!(OperatorServiceClient, evict_session),
            _ => panic!("the runner does not know {method}"),
        }
    }
}

fn to_json(descriptor: MessageDescriptor, message: &impl prost_reflect::prost::Message) -> Value {
    let mut dynamic = DynamicMessage::new(descriptor);
    dynamic.transcode_from(message).unwrap();
    serde_json::to_value(dynamic).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no string"))
}

/// Whether `outcome` is as expected.
fn verdict(expect: &Value, outcome: &Outcome) -> Result<(), Complaint> {
    let code = expect.get("code").map_or("OK", text);
    match outcome {
        Ok(answer) => {
            check(code == "OK", || format!("{code} was expected"))?;
            if let Some(response) = expect.get("response") {
                compare("", response, answer)?;
            }
            for path in paths(expect, "present") {
                check(at(answer, path).is_some(), || format!("{path} is absent"))?;
            }
            for path in paths(expect, "absent") {
                check(at(answer, path).is_none(), || format!("{path} is present"))?;
            }
            Ok(())
        }
        Err(status) => failed_as_expected(code, expect, status),
    }
}

fn failed_as_expected(code: &str, expect: &Value, status: &Status) -> Result<(), Complaint> {
    check(code == name_of(status.code()), || format!("{code} was expected"))?;
    let details = status.get_error_details();
    if let Some(reason) = expect.get("reason") {
        let info = details.error_info().ok_or("no ErrorInfo")?;
        check(info.reason == text(reason), || format!("the reason is {}", info.reason))?;
        check(info.domain == "moorage.v1", || format!("the domain is {}", info.domain))?;
    }
    if let Some(field) = expect.get("field") {
        let named = details.bad_request().into_iter().flat_map(|bad| &bad.field_violations);
        check(named.clone().any(|violation| violation.field == text(field)), || format!("{field} is not named"))?;
    }
    if expect["retry_info"] == true {
        let delay = details.retry_info().and_then(|info| info.retry_delay);
        check(delay.is_some_and(|delay| !delay.is_zero()), || format!("the delay to retry is {delay:?}"))?;
    }
    Ok(())
}

fn check(holds: bool, complaint: impl FnOnce() -> Complaint) -> Result<(), Complaint> {
    if holds { Ok(()) } else { Err(complaint()) }
}

fn paths<'a>(expect: &'a Value, key: &str) -> impl Iterator<Item = &'a str> {
    expect[key].as_array().into_iter().flatten().map(text)
}

/// The value at a path of names and numbers of items.
fn at<'a>(answer: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(answer, |value, part| match value {
        Value::Array(items) => items.get(part.parse::<usize>().ok()?),
        _ => value.get(part),
    })
}

/// Whether `actual` holds at least what `expected` does.
fn compare(path: &str, expected: &Value, actual: &Value) -> Result<(), Complaint> {
    let differs = || format!("at {path:?}, {expected} was expected, not {actual}");
    match (expected, actual) {
        (Value::Object(fields), Value::Object(answer)) => fields.iter().try_for_each(|(name, field)| {
            let path = format!("{path}.{name}");
            match answer.get(name) {
                Some(value) => compare(&path, field, value),
                None => check(is_default(field), || format!("{path} is absent")),
            }
        }),
        (Value::Array(items), Value::Array(answer)) => {
            check(items.len() == answer.len(), differs)?;
            let pairs = items.iter().zip(answer).enumerate();
            pairs.into_iter().try_for_each(|(number, (item, value))| compare(&format!("{path}.{number}"), item, value))
        }
        (Value::Number(number), Value::Number(value)) => check(number.as_f64() == value.as_f64(), differs),
        _ => check(expected == actual, differs),
    }
}

/// A default is not on the wire.
fn is_default(value: &Value) -> bool {
    matches!(value, Value::Bool(false))
        || value.as_f64() == Some(0.0)
        || value.as_str().is_some_and(|s| s == "0" || s.is_empty())
}

/// The code's name as gRPC writes it.
fn name_of(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() && code != Code::Ok {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

//! A move by QEMU's own migration: multifd, zero pages found on its channels, no limit of bandwidth.

use crate::ends::{Source, Target, downtime};
use crate::monitor::Monitor;
use crate::sample::Cost;
use crate::settings::Settings;
use serde_json::json;
use std::time::Instant;

/// Moves the guest.
pub fn migrate(settings: &Settings, source: &mut Source, target: &mut Target) -> Cost {
    prepare(settings, &mut source.end.monitor);
    prepare(settings, &mut target.end.monitor);
    let port = listen(&mut target.end.monitor);
    let cpu_before = source.end.cpu() + target.end.cpu();
    let start = Instant::now();
    source.end.monitor.execute("migrate", json!({ "uri": format!("tcp:127.0.0.1:{port}") }));
    match source.case().runs() {
        true => _ = target.wait_resumed(),
        false => _ = target.end.monitor.wait_migration("completed"),
    }
    let wall = start.elapsed();
    source.end.monitor.wait_migration("completed");
    target.end.monitor.wait_migration("completed");
    let cpu = source.end.cpu() + target.end.cpu() - cpu_before;
    let said = source.end.monitor.execute("query-migrate", json!({}));
    Cost {
        wall,
        total_ms: said["total-time"].as_u64().unwrap_or_default(),
        cpu,
        downtime: downtime(source.case(), source, target),
        downtime_said_ms: said["downtime"].as_u64().unwrap_or_default(),
    }
}

fn prepare(settings: &Settings, monitor: &mut Monitor) {
    let on = ["multifd", "return-path", "events"].map(|name| json!({ "capability": name, "state": true }));
    monitor.execute("migrate-set-capabilities", json!({ "capabilities": on }));
    // A bandwidth of 0 is none at all.
    let parameters = json!({
        "multifd-channels": settings.channels,
        "zero-page-detection": "multifd",
        "max-bandwidth": 0,
        "downtime-limit": 300,
    });
    monitor.execute("migrate-set-parameters", parameters);
}

/// Has the target listen on a port of the kernel's choice.
fn listen(target: &mut Monitor) -> String {
    target.execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }));
    let listening = target.execute("query-migrate", json!({}));
    listening["socket-address"][0]["port"].as_str().expect("a listening QEMU says where").to_owned()
}

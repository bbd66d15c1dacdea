//! The rows as bars, in one HTML file that needs nothing else.

use crate::row::Row;
use crate::settings::Settings;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

/// Writes the page beside what cargo built; gives where it is.
pub fn write(machine: &str, settings: &Settings, rows: &[Row]) -> PathBuf {
    let program = std::env::current_exe().expect("a bench knows its path");
    let path = program.ancestors().nth(2).unwrap_or(&program).join("bench-qemu.html");
    fs::write(&path, html(machine, settings, rows)).expect("the build directory is writable");
    path
}

fn html(machine: &str, settings: &Settings, rows: &[Row]) -> String {
    let (times, cpu) = (bars(rows, |row| row.ratio()), bars(rows, |row| row.cpu_ratio()));
    format!(
        "<!doctype html><meta charset=utf-8><title>whimbrel beside QEMU</title>\n\
         <style>body{{font:15px sans-serif;margin:2em}}text{{font-size:13px}}</style>\n\
         <h1>whimbrel beside QEMU</h1><p>{machine}: {}</p>\n\
         <h2>Time: QEMU's over whimbrel's</h2>{times}\n<h2>CPU: QEMU's over whimbrel's</h2>{cpu}\n",
        settings.told()
    )
}

/// A bar for each row, on a scale where every doubling is as wide, with a line where both are equal.
fn bars(rows: &[Row], value: impl Fn(&Row) -> f64) -> String {
    let height = ROW * rows.len() + 10;
    let mut svg = format!("<svg width={WIDTH} height={height}>");
    for (place, row) in rows.iter().enumerate() {
        let (ratio, y) = (value(row), ROW * place);
        let length = (ratio.log2() * DOUBLING).clamp(-LEFT_MAX, RIGHT_MAX);
        let (x, color) = if length < 0.0 { (EQUAL + length, "#c0504d") } else { (EQUAL, "#4f8a5b") };
        let _ = write!(
            svg,
            "<text x=0 y={text}>{case}, {memory}</text>\
             <rect x={x:.0} y={top} width={width:.0} height=16 fill='{color}'/>\
             <text x={label:.0} y={text}>{ratio:.2}</text>",
            text = y + 17,
            top = y + 4,
            case = row.case.name(),
            memory = row.memory.name(),
            width = length.abs(),
            label = EQUAL + length.max(0.0) + 6.0,
        );
    }
    let _ = write!(svg, "<line x1={EQUAL} x2={EQUAL} y1=0 y2={height} stroke='#333'/></svg>");
    svg
}

const WIDTH: usize = 820;
const ROW: usize = 24;

/// Where a ratio of 1 is, and pixels for each doubling.
const EQUAL: f64 = 300.0;
const DOUBLING: f64 = 60.0;
const LEFT_MAX: f64 = 130.0;
const RIGHT_MAX: f64 = 460.0;

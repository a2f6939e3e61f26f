// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them.

export function number(x, digits = 3) {
  if (x == null || Number.isNaN(x)) return "–";
  if (x !== 0 && (Math.abs(x) >= 1e6 || Math.abs(x) < 1e-3)) return x.toExponential(digits - 1);
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : `${+x.toPrecision(digits)}`;
}

export function bytes(x) {
  if (x == null) return "–";
  for (const [unit, factor] of [
    ["TB", 1e12],
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ])
    if (x >= factor) return `${+(x / factor).toPrecision(3)} ${unit}`;
  return `${Math.round(x)} B`;
}

export function seconds(x) {
  if (x == null) return "–";
  const size = Math.abs(x);
  if (size === 0 || size >= 1) return `${number(x, 4)} s`;
  return size >= 1e-3 ? `${+(x * 1e3).toPrecision(3)} ms` : `${+(x * 1e6).toPrecision(3)} µs`;
}

export function percent(x) {
  return x == null ? "–" : `${Math.round(100 * x)} %`;
}

export function count(n, noun) {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

export function mean(values) {
  return values.reduce((sum, x) => sum + x, 0) / values.length;
}

// The value of a curve at x, along straight lines.
export function at(xs, ys, x) {
  let low = 0;
  let high = xs.length - 1;
  if (x <= xs[low]) return ys[low];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const share = xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + share * (ys[high] - ys[low]);
}

// Numbers for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (n) => whole.format(n);

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

export function percent(part, of) {
  if (!of) return "–";
  const value = (100 * part) / of;
  return `${value.toFixed(value < 10 && value > 0 ? 1 : 0)} %`;
}

export function probability(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95) return "100 %";
  if (value >= 0.1) return `${value.toFixed(1)} %`;
  return value >= 0.001 ? `${value.toFixed(3)} %` : "< 0.001 %";
}

export function rate(perSecond) {
  return perSecond >= 100 ? count(perSecond) : perSecond.toFixed(1);
}

// The colours of drawings, from the style sheet. Read once for each theme.

let colours = null;

export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = {
      blocks: [0, 1, 2, 3, 4, 5].map((state) => of(`block-${state}`)),
      prefill: of("prefill"),
      decode: of("decode"),
      line: of("line-strong"),
      ink: of("ink"),
      faint: of("ink-3"),
      bad: of("bad"),
      veil: of("veil"),
      font: `11px ${of("sans")}`,
    };
  }
  return colours;
}

export function forgetPalette() {
  colours = null;
}

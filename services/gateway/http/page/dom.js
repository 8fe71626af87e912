// Elements without markup in strings: what a model or a tenant writes is never read as HTML.

export const $ = (id) => document.getElementById(id);

// element("p.note", {hidden: true}, "text", child, …): properties that are no attribute of the element's are set as such.
export function element(selector, properties = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Only where it differs: writing the same text again would still cost a layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const store = {
  get(key, fallback) {
    try {
      return JSON.parse(localStorage.getItem(key)) ?? fallback;
    } catch {
      return fallback;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch {
      // A browser that keeps nothing still works.
    }
  },
};

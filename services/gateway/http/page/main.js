// The frame: which view is shown, the theme, the model, and whether the server is ready.

import { $, setText } from "./dom.js";
import { LiveView } from "./live.js";
import { Playground } from "./playground.js";
import { call } from "./sse.js";

const ASK_AGAIN = 5000; // ms
const ASK_SOON = 1000; // while the server is not ready
const THEMES = { "": ["◐", "Colours: as the system"], light: ["☀", "Colours: light"], dark: ["☾", "Colours: dark"] };

new Playground();
const live = new LiveView($("live"));

function showView() {
  const view = location.hash === "#live" ? "live" : "playground";
  for (const id of ["playground", "live"]) $(id).hidden = id !== view;
  for (const link of document.querySelectorAll("nav [data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "live" ? "Live · Quartet" : "Quartet";
  live.show(view === "live");
}

function showTheme() {
  const [sign, label] = THEMES[document.documentElement.dataset.theme ?? ""];
  setText($("theme"), sign);
  $("theme").title = label;
  $("theme").setAttribute("aria-label", label);
  live.recolour();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const { dataset } = document.documentElement;
  const name = names[(names.indexOf(dataset.theme ?? "") + 1) % names.length];
  if (name) dataset.theme = name;
  else delete dataset.theme;
  localStorage.setItem("theme", name);
  showTheme();
}

let asking = 0;

async function askReady() {
  clearTimeout(asking);
  if (document.visibilityState === "hidden") return;
  let ready = false;
  let reason = "The server does not answer";
  try {
    ({ ready, reason } = await (await fetch("ready")).json());
    if (ready && !$("model").textContent) {
      const { data } = await (await call("v1/models")).json();
      setText($("model"), data[0]?.id ?? "");
    }
  } catch {
    // Told below.
  }
  const box = $("readiness");
  box.className = `readiness ${ready ? "good" : "bad"}`;
  setText(box, ready ? "Ready" : "Not ready");
  box.title = ready ? "Every service is there" : reason;
  clearTimeout(asking);
  asking = setTimeout(askReady, ready ? ASK_AGAIN : ASK_SOON);
}

addEventListener("hashchange", showView);
$("theme").addEventListener("click", nextTheme);
document.addEventListener("visibilitychange", () => {
  live.show(!$("live").hidden);
  askReady();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.recolour());

showView();
showTheme();
askReady();

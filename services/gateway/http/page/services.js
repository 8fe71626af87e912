// The line of services: who is there, and who has come back.

import { element, setText } from "./dom.js";

const ROLES = ["gateway", "tokenizer", "scheduler", "executor"];
const NEWS = 15; // seconds for which a return is news

export class Services {
  constructor() {
    this.cards = new Map();
    this.node = element("ol.services", { "aria-label": "Services" });
  }

  // `now`: the feed's clock.
  update(state, now) {
    const shown = [];
    for (const role of ROLES) {
      const found = state.services.filter((service) => service.role === role);
      if (found.length) found.forEach((service) => shown.push([`${role} ${found.length > 1 ? service.name : ""}`, service]));
      else shown.push([`${role} `, { role, absent: true }]);
    }
    for (const [key, card] of this.cards) {
      if (!shown.some(([other]) => other === key)) {
        card.node.remove();
        this.cards.delete(key);
      }
    }
    shown.forEach(([key, service], index) => {
      let card = this.cards.get(key);
      if (!card) this.cards.set(key, (card = new Card()));
      if (this.node.children[index] !== card.node) this.node.insertBefore(card.node, this.node.children[index] ?? null);
      card.show(service, state.known(service), now);
    });
  }
}

class Card {
  constructor() {
    this.role = element("b");
    this.word = element("span.service-state");
    this.incarnation = element("code");
    this.starts = element("span.starts");
    this.node = element("li.service", {}, this.role, this.word, this.incarnation, this.starts);
  }

  show(service, known, now) {
    const [kind, word] = standing(service, known, now);
    setText(this.role, service.role);
    setText(this.word, word);
    setText(this.incarnation, service.incarnation ? service.incarnation.slice(-6) : "");
    setText(this.starts, known?.starts ? `↻ ${known.starts}` : "");
    this.starts.title = known?.starts ? `Started anew ${known.starts} times since this page looks` : "";
    this.node.title = service.absent ? "" : `${service.name}, version ${service.version}\nincarnation ${service.incarnation}`;
    this.node.dataset.kind = kind;
  }
}

function standing(service, known, now) {
  if (service.absent) return ["gone", "not there"];
  const seconds = Math.max(0, Math.round(now - (known?.since ?? now)));
  if (!service.alive) return ["gone", `gone for ${seconds} s`];
  if (service.stalled) return ["bad", "makes no progress"];
  if (service.draining) return ["bad", "shutting down"];
  if (!service.ready) return ["waits", "not ready"];
  return known?.starts && seconds < NEWS ? ["news", "back"] : ["good", "ready"];
}

// Requests of one kind: one at a time, and of those that wait only the newest is sent.

const token = document.querySelector("meta[name=token]").content;
const PATIENCE = 600; // Milliseconds after which a newer request ends an older one.

export class Asker {
  constructor(kind, onAnswer) {
    this.kind = kind;
    this.onAnswer = onAnswer;
    this.next = null;
    this.running = null;
  }

  ask(state) {
    this.next = state;
    if (this.running === null) {
      this.run();
    } else {
      const left = this.running.begin + PATIENCE - performance.now();
      const running = this.running;
      clearTimeout(running.timer);
      running.timer = setTimeout(() => running.controller.abort(), Math.max(0, left));
    }
  }

  async run() {
    while (this.next !== null) {
      const state = this.next;
      this.next = null;
      this.running = { begin: performance.now(), controller: new AbortController(), timer: 0 };
      const answer = await this.send(state, this.running.controller.signal);
      clearTimeout(this.running.timer);
      this.running = null;
      if (answer !== null) this.onAnswer(answer, state);
    }
  }

  async send(state, signal) {
    try {
      const response = await fetch("/answer", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Attndsl-Token": token },
        body: JSON.stringify({ kind: this.kind, ...state }),
        signal,
      });
      if (response.headers.get("Content-Type") === "application/json") return await response.json();
      return failure((await response.text()).trim() || `the server says ${response.status}`, null);
    } catch (error) {
      if (error.name === "AbortError") return null;
      return failure("the server does not answer", "start 'attndsl play' again");
    }
  }
}

function failure(message, hint) {
  return { problems: [{ message, hint, start: null, end: null, where: "" }], result: null };
}

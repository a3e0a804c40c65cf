"use strict";
// A served page: asks for what is new while it is visible, and for the episodes that its reader looks for.
const page = document.querySelector("main"), token = page.dataset.token, query = page.dataset.query;
const EVERY = 2000, AFTER_FAILURE = 5000, SHARE = 10;  // milliseconds; the server spends one part in so many on us
let cursor = page.dataset.cursor, timer = 0, spent = 0;

const told = {};  // of each part, what the server said last: the page's own may have been drawn into since
for (const part of document.querySelectorAll("[data-part]")) { told[part.dataset.part] = null; }

async function ask(path, words) {
  const answer = await fetch(`${path}?${new URLSearchParams({ ...Object.fromEntries(new URLSearchParams(query)), ...words, token })}`);
  if (answer.status === 204) { return null; }
  if (!answer.ok) { throw new Error(await answer.text()); }
  spent = Number(answer.headers.get("Server-Timing")?.match(/dur=(\d+)/)?.[1] || 0);
  return answer.text();
}

function pulse(text, kind) {
  const shown = document.getElementById("pulse");
  shown.textContent = text;
  shown.className = kind;
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) { pulse("paused", ""); return; }
  let wait = EVERY;
  try {
    const text = await ask("page", { cursor });
    wait = Math.max(EVERY, SHARE * spent);
    if (text !== null) {
      take(new DOMParser().parseFromString(text, "text/html"));
      await find();
    }
    pulse("live", "good");
  } catch (error) {
    wait = AFTER_FAILURE;
    pulse(error instanceof TypeError ? "the server does not answer" : error.message, "bad");
  }
  timer = setTimeout(poll, wait);
}

// Parts of the page that differ from what they were take their place; charts are drawn again in the others.
function take(next) {
  const main = next.querySelector("main");
  cursor = main.dataset.cursor;
  data = JSON.parse(next.getElementById("data").textContent);
  document.title = next.title;
  for (const part of main.querySelectorAll("[data-part]")) {
    const name = part.dataset.part, html = part.innerHTML;
    if (told[name] === html) { continue; }
    const here = page.querySelector(`[data-part='${name}']`);
    const open = new Set([...here.querySelectorAll("details[open] > summary")].map((summary) => summary.firstChild.textContent));
    const picked = [...here.querySelectorAll("input:checked")].map((input) => `input[name=${input.name}][value='${input.value}']`);
    clear(here);
    here.replaceChildren(...part.childNodes);
    here.querySelectorAll("details > summary").forEach((summary) => { summary.parentNode.open = open.has(summary.firstChild.textContent); });
    picked.forEach((choice) => { const input = here.querySelector(choice); if (input) { input.checked = true; } });
    told[name] = html;
  }
  page.querySelectorAll(".curves").forEach((curves) => { curves.hidden = !data.charts.length; });
  follow();
  if (drawsAnything()) { draw(); }
}

// -- episodes

const looking = document.getElementById("looking");
let shown = 0;

async function find() {
  if (!looking) { return; }
  const words = Object.fromEntries([...new FormData(looking)].filter(([, word]) => word !== ""));
  const found = document.getElementById("found");
  try {
    found.innerHTML = await ask("episodes", { ...words, page: shown });
  } catch (error) {
    found.replaceChildren(Object.assign(document.createElement("p"), { className: "sub", textContent: error.message }));
    return;
  }
  const named = JSON.parse(found.querySelector("[data-environments]").dataset.environments), choice = looking.elements.environment;
  if (named.length > 1 && choice.options.length !== named.length + 1) {
    const picked = choice.value;
    choice.replaceChildren(new Option("every environment", ""), ...named.map((name) => new Option(name, name)));
    choice.value = picked;
  }
  choice.hidden = named.length < 2;
  mark();
}

function mark() {
  const open = [...document.querySelectorAll("[data-opened]")].map((part) => part.dataset.opened);
  document.querySelectorAll("#found tr[data-key]").forEach((row) => { row.classList.toggle("here", open.includes(row.dataset.key)); });
}

async function open(key, group) {
  const panel = document.getElementById("opened");
  try {
    document.getElementById("episode").innerHTML = await ask("episode", group ? { key, group } : { key });
  } catch (error) {
    document.getElementById("episode").textContent = error.message;
  }
  panel.hidden = false;
  history.replaceState(null, "", `#${group ? "group" : "episode"}=${encodeURIComponent(key)}`);
  mark();
}

if (looking) {
  let typing = 0;
  const again = () => { shown = 0; clearTimeout(typing); typing = setTimeout(find, 150); };
  looking.addEventListener("input", again);
  looking.addEventListener("reset", again);
  looking.addEventListener("submit", (event) => { event.preventDefault(); again(); });
  document.addEventListener("click", async (event) => {
    const { target } = event, named = target.closest("[data-key]"), turned = target.closest("[data-page]");
    if (target.closest("[data-close]")) {
      document.getElementById("opened").hidden = true;
      document.getElementById("episode").replaceChildren();
      history.replaceState(null, "", " ");
      mark();
    } else if (turned) {
      shown = Number(turned.dataset.page);
      find();
    } else if (named) {
      await open(named.dataset.key, named.dataset.group);
      if (named.tagName === "TR") { document.getElementById("opened").scrollIntoView({ behavior: "smooth", block: "start" }); }
    }
  });
  pointed = (step) => {
    if (typeof step !== "number") { return; }
    looking.reset();
    looking.elements.step_min.value = looking.elements.step_max.value = step;
    again();
    document.getElementById("episodes").scrollIntoView({ behavior: "smooth" });
  };
  const [, kind, key] = location.hash.match(/^#(episode|group)=(.*)$/) || [];
  if (key) { open(decodeURIComponent(key), kind === "group" ? "1" : undefined); }
  find();
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) { poll(); } });
timer = setTimeout(poll, EVERY);

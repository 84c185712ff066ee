// The page around the lab: loading, the address, links to copy. The lab itself is view.js, as in the notebooks.

import { mount } from "./view.js";

const find = (id) => document.getElementById(id);
const ADDRESS_PAUSE = 250; // milliseconds: browsers refuse an address that changes all the time

let view, query = "", writing;
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
worker.onerror = () => window.fail("The lab's worker could not be loaded.");
worker.onmessage = ({ data }) => {
  if ("loaded" in data) showLoaded(data.loaded);
  if ("stage" in data) showStage(data.stage);
  if ("failed" in data) window.fail(data.failed);
  if ("text" in data) show(JSON.parse(data.text));
};
worker.postMessage({ query: location.search });

function showLoaded(bytes) {
  const progress = find("progress");
  progress.value = bytes;
  find("megabytes").textContent = `${(bytes / 1e6).toFixed(1)} of ${(progress.max / 1e6).toFixed(1)} MB`;
  if (bytes >= progress.max) showStage("Starting Python");
}

// From here on nobody knows how long it takes.
function showStage(words) {
  find("stage").textContent = `${words} …`;
  find("progress").removeAttribute("value");
}

function explain({ controls }) {
  for (const { label, help } of controls) {
    find("words").lastChild.append(element("dt", label), element("dd", help));
  }
  find("words").hidden = false;
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function show({ answer, query: now }) {
  if (!view) {
    find("loading").remove();
    view = mount(find("lab"), answer, { send: (message) => worker.postMessage(JSON.stringify(message)) });
    find("copy").disabled = false;
    explain(answer);
  } else if (answer.kind) view.receive(answer);
  else view.update(answer);
  query = now;
  find("said").textContent = ""; // a link that was copied before is no longer this one
  find("link").hidden = true;
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", link()), ADDRESS_PAUSE);
}

const link = () => new URL(`?${query}`, location.href).href;

// Without https a browser has no clipboard for pages: then the address is shown, marked, to be copied by hand.
find("copy").addEventListener("click", async () => {
  const field = find("link");
  try {
    await navigator.clipboard.writeText(link());
    field.hidden = true;
    find("said").textContent = "The link is copied: it opens the lab with these settings.";
  } catch {
    field.hidden = false;
    field.value = link();
    field.select();
    find("said").textContent = "Copy this address: it opens the lab with these settings.";
  }
});

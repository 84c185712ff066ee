// Python beside the page, so that the page stays responsive while the scheduler runs.
//
// In:  {query} once, then the messages of view.js as JSON.
// Out: {loaded} bytes so far, {stage}, {text}: an answer of course_lib.lab.web.Page as JSON, or {failed}: why there is none.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const post = (message) => self.postMessage(message);

// Pyodide fetches its parts itself: count what comes in.
const plainFetch = self.fetch;
let loaded = 0;
self.fetch = async (...request) => {
  const response = await plainFetch(...request);
  if (!response.ok) throw new Error(`${response.url} is not there (status ${response.status})`);
  const count = new TransformStream({
    transform(bytes, onwards) { loaded += bytes.length; post({ loaded }); onwards.enqueue(bytes); },
  });
  return new Response(response.body.pipeThrough(count), response);
};

async function start(query) {
  const courseLib = fetch("course_lib.zip").then((response) => response.arrayBuffer());
  const [python, files] = await Promise.all([loadPyodide(), courseLib]);
  python.unpackArchive(files, "zip");
  const web = python.pyimport("course_lib.lab.web");
  post({ stage: "Running the scheduler" });
  return web.Page(query);
}

let page;
self.onmessage = async ({ data }) => {
  try {
    if (data.query !== undefined) {
      page = start(data.query);
      post({ text: (await page).start() });
    } else post({ text: (await page).handle(data) });
  } catch (error) {
    post({ failed: String(error.message ?? error) });
  }
};

// The server's events, and its errors as one line for people.

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The JSON of a GET; throws Refusal. */
export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

/** Yields the chunks of a streamed chat completion; throws Refusal, or AbortError when `signal` says stop. */
export async function* streamChat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusalOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refusal("the connection broke before the answer was complete", 0);
    const events = (unread + value).split("\n\n");
    unread = events.pop();
    for (const event of events) {
      const said = event.replace(/^data: /, "");
      if (said === "[DONE]") return;
      const chunk = JSON.parse(said);
      if (chunk.error) throw new Refusal(chunk.error.message, response.status);
      yield chunk;
    }
  }
}

async function refusalOf(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of our own errors: a proxy's, perhaps
  }
  return new Refusal(message, response.status);
}

"""A server that speaks OpenAI's protocol, and refuses what such servers refuse. What it says is up to the test."""
import base64, http.server, io, json, math, threading, time

from PIL import Image

class StandIn(http.server.ThreadingHTTPServer):
    """answer(text, pictures) -> a text; a status; or, with likelihoods, a list of pieces (token, {token: probability}).
    `change` is laid over each choice, and the next replies are `troubles`, pairs of a status, or a body, and headers."""
    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.requests = answer, [], 0
        self.key, self.refused, self.troubles, self.change, self.most = None, set(), [], {}, 20
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def handle_error(self, *args):
        """Of a client that waits no longer."""

class Refusal(Exception):
    pass

def demand(condition, status, message):
    if not condition:
        raise Refusal(status, message)

def read_part(part):
    """-> a text or a picture; what else is in a part, or a picture that is none, is refused."""
    if part.keys() == {"type", "text"} and part["type"] == "text":
        return part["text"]
    demand(part.keys() == {"type", "image_url"} and part["type"] == "image_url", 400, f"Invalid part: {part}")
    head, _, data = part["image_url"]["url"].partition(",")
    demand(head == "data:image/png;base64", 400, "Invalid image URL")
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log_message = lambda *args: None

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.requests += 1
            status, headers = self.server.troubles.pop(0) if self.server.troubles else (200, {})
        text = None
        if isinstance(status, bytes):
            text, status = status, 200
        try:
            demand(status == 200, status, "in trouble")
            reply = self.complete(json.loads(data))
        except Refusal as refusal:
            status, reply = refusal.args[0], {"error": {"message": refusal.args[1], "type": "invalid_request_error"}}
        body = json.dumps(reply).encode() if text is None else text
        self.send_response(status)
        for name, value in dict(headers, **{"Content-Type": "application/json", "Content-Length": len(body)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def complete(self, body):
        server = self.server
        demand(self.path == "/v1/chat/completions", 404, f"Not Found: {self.path}")
        said = self.headers.get("Authorization")
        demand(server.key is None or said == f"Bearer {server.key}", 401, f"Incorrect API key provided: {said}")
        demand(self.headers["Content-Type"] == "application/json", 415, "Unsupported Media Type")
        known = {"model", "messages", "temperature", "logprobs", "top_logprobs"} - server.refused
        demand(body.keys() <= known, 400, f"Unrecognized request arguments: {body.keys() - known}")
        demand(body["model"] == "any", 404, f"The model {body['model']} does not exist")
        demand(0 <= body.get("temperature", 1) <= 2, 400, "temperature")
        demand(type(body.get("logprobs", False)) is bool, 400, "logprobs")
        top = body.get("top_logprobs", 0)
        demand(0 <= top <= server.most and (body.get("logprobs") or not top), 400, "top_logprobs")
        message, = body["messages"]
        demand(message.keys() == {"role", "content"} and message["role"] == "user", 400, "messages")
        text, *pictures = [read_part(part) for part in message["content"]]
        with server.lock:
            server.asked.append((text, *pictures))
        answer = server.answer(text, pictures)
        demand(not isinstance(answer, int), answer, "Your input was flagged: content that is not allowed at any temperature")
        has_chances = isinstance(answer, list)
        content = "".join([piece for piece, _ in answer]) if has_chances else answer
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        if body.get("logprobs") and has_chances:
            choice["logprobs"] = {"content": [describe(*piece) for piece in answer]}
        return {"id": "1", "object": "chat.completion", "choices": [choice | server.change]}

def describe(token, others):
    """One of the protocol's logprobs.content."""
    def tell(text):
        return {"token": text, "logprob": math.log(others.get(text, 1)), "bytes": [*text.encode()]}

    likeliest = sorted(others, key=others.get, reverse=True)[:20]
    return tell(token) | {"top_logprobs": [tell(text) for text in likeliest]}
